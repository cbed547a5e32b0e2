"""What each method cannot do, as far as a spec alone tells. Torch-free: a job is refused when it is submitted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.checkpoint_names import parse_checkpointing
from engine.errors import UnsupportedError
from engine.result import Method
from engine.spec import RunSpec, expand

MEASURED_RANKS = 16
"""Processes that one machine runs for one measurement."""
SIMULATED_RANKS = 1024
"""FSDP2 makes a chunk for each rank and parameter: beyond this a simulation takes minutes."""


def check_method(spec: RunSpec, method: Method, device: str | None = None) -> None:
    """Raises UnsupportedError, naming the field, for what `method` never does. `device` is the kind that `auto` means
    here, where that is known already."""
    for field, refused, message in _refusals(spec, method, device or spec.device):
        if refused:
            raise UnsupportedError(field, message)


def expand_for(method: Method, spec: Mapping[str, Any], vary: Mapping[str, Sequence[Any]]) -> list[RunSpec]:
    """The grid as `engine.spec.expand` makes it, with its errors; UnsupportedError if `method` refuses a run of it."""
    specs = expand(spec, vary)
    for each in specs:
        check_method(each, method)
    return specs


def _refusals(spec: RunSpec, method: Method, device: str) -> Iterator[tuple[str, bool, str]]:
    arch, training = spec.architecture, spec.mode == "train"
    offloaded = {spec.offload_optimizer, spec.offload_parameters, spec.offload_activations} != {"none"}
    if method == "closed-form":
        wrong = arch.family != "decoder"
        yield "model", wrong, f"{arch.name} ({arch.model_type}, {arch.family}) has no closed form: use method=simulated"
        return
    wrong = not training and spec.runs_transformers
    yield "model, mode", wrong, f"{method} inference runs in our decoder, which has no {arch.model_type} style"
    if training:
        yield from _untrainable(spec)
    if method == "simulated":
        yield (
            "attention",
            spec.attention == "triton",
            "the triton kernel is not simulated, as it needs a CUDA device: tiled and flash keep the same",
        )
        sharded = spec.sharding != "none" and spec.world_size > 1
        yield (
            "sharding, offload_*",
            sharded and offloaded,
            f"{spec.sharding} over {spec.world_size} ranks is simulated without offloading; use method=closed-form",
        )
        yield (
            "world_size",
            sharded and spec.world_size > SIMULATED_RANKS,
            f"{spec.sharding} is simulated over up to {SIMULATED_RANKS:,} ranks; use method=closed-form",
        )
    elif training and spec.world_size > 1:
        yield (
            "world_size",
            spec.world_size > MEASURED_RANKS,
            f"at most {MEASURED_RANKS} ranks can be measured on one machine; predictions go beyond",
        )
        places = (spec.offload_parameters, spec.offload_optimizer, spec.offload_activations)
        fsdp_offloads = device != "cpu" and spec.sharding == "zero-3" and places == ("cpu", "cpu", "none")
        yield (
            "world_size, offload_*",
            offloaded and not fsdp_offloads,
            "ranks are measured with offloading only as zero-3 on CUDA with offload_parameters=cpu and "
            "offload_optimizer=cpu (FSDP2's policy); measure other offloading with world_size=1",
        )


def _untrainable(spec: RunSpec) -> Iterator[tuple[str, bool, str]]:
    """What no step of the spec could do, simulated or measured."""
    arch, plan = spec.architecture, parse_checkpointing(spec.checkpointing)
    none_drops = spec.dropout == 0.0 and "dropout" in (plan.groups or ())
    yield "checkpointing, dropout", none_drops, "there is no dropout to recompute: leave it out, or set dropout"
    stacks = arch.family == "encoder-decoder"
    yield "checkpointing", stacks and plan.kind == "budget", "budget-F plans one stack of blocks; this model has two"
    offloaded = spec.offload_parameters != "none"
    yield (
        "offload_parameters",
        stacks and offloaded,
        "a decoder's blocks wait for an encoder: offload the optimizer only",
    )
    name = "loss" if spec.loss == "fused" else "loss_chunks"
    fused = spec.loss == "fused" or spec.loss_chunks > 1
    yield (
        name,
        fused and arch.family.startswith("encoder"),
        f"{arch.model_type} has a loss of its own: use loss=auto, loss_chunks=1",
    )
    if plan.kind == "budget" and not spec.runs_transformers:
        # Here, since the closed form asks this module what it can do.
        from engine.checkpointing.budget import spare_bytes
        from engine.closed_form.training import budget_profile

        spare_bytes(budget_profile(spec), plan.budget)
