"""`remat plan`: which configuration to run on a GPU."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from app.flags import grid, with_spec_flags
from engine.errors import SpecError
from engine.spec import RunSpec

NOTHING_FITS = 1


@with_spec_flags
def make_plan(
    flags: dict[str, str],
    gpus: Annotated[int, typer.Option(min=1, help="How many of them.")] = 1,
    host_memory_gib: Annotated[float, typer.Option(min=0, help="Host memory for offloading.")] = 512,
    nvme_gib: Annotated[float, typer.Option(min=0, help="NVMe space for offloading.")] = 0,
    objective: Annotated[str, typer.Option(help="What is best among what fits.")] = "throughput",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document, as POST /api/v1/plans.")] = False,
) -> None:
    """What fits on --gpu, and what is fastest. Exit 1 if nothing fits."""
    from app.terminal import plan_table
    from engine.planning import OBJECTIVES, plan

    spec, vary = grid(flags)
    if vary:
        raise SpecError(next(iter(vary)), "a plan starts from one value")
    if "gpu" not in spec:
        raise SpecError("gpu", "name the GPU to plan for: --gpu h100-sxm")
    chosen = next((each for each in OBJECTIVES if each == objective), None)
    if chosen is None:
        raise SpecError("objective", f"one of {', '.join(OBJECTIVES)}")
    found = plan(RunSpec.model_validate(spec), spec["gpu"], gpus, host_memory_gib, nvme_gib, chosen)
    if as_json:
        print(found.model_dump_json())
    else:
        plan_table(found)
    if found.recommended is None:
        print(f"nothing fits on {gpus} × {spec['gpu']}", file=sys.stderr)
        raise typer.Exit(NOTHING_FITS)
