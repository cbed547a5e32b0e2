"""What the command line shows: one JSON line a result for programs, a table and progress for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from app.fields import spell
from engine.planning import Plan
from engine.result import Fits, RunResult
from engine.spec import RunSpec
from engine.units import format_bytes, format_count, format_seconds

Json = Mapping[str, Any]


def json_line(result: RunResult) -> None:
    """One RunResult on stdout, at once: the next run may take minutes."""
    print(result.model_dump_json(), flush=True)


def differing(specs: Sequence[RunSpec]) -> list[str]:
    """The fields that are not the same in all specs."""
    values = [spec.model_dump() for spec in specs]
    return [key for key in values[0] if any(value[key] != values[0][key] for value in values)] if values else []


def label(spec: RunSpec, keys: Iterable[str]) -> str:
    """`per-layer, flash`; a single run is named by its model."""
    return ", ".join(_word(getattr(spec, key)) for key in keys) or _word(spec.model)


def _word(value: Any) -> str:
    """What is typed for it on a command line; a config object came from a file."""
    return "config.json" if isinstance(value, dict) else spell(value)


def results_table(results: Sequence[RunResult]) -> None:
    """The results side by side on stdout, each against its GPU where one is named."""
    differ = differing([result.spec for result in results])
    keys = differ or ["model"]
    last = "fits" if any(result.fits for result in results) else "outcome"
    table = Table(*keys, title=None, box=None, pad_edge=False, header_style="bold")
    for heading in ("peak memory", "saved", "step", "tokens", last):
        table.add_column(heading, justify="left" if heading == last else "right")
    for result in results:
        table.add_row(*(label(result.spec, [key]) for key in keys), *_figures(result))
    console = Console()
    console.print(table)
    for note in _notes(results, differ):
        console.print(note, style="dim", markup=False, highlight=False)


def _notes(results: Sequence[RunResult], keys: Sequence[str]) -> Iterator[str]:
    """What the results say of themselves, once; a note that is not all runs' names its own."""
    said: dict[str, list[str]] = {}
    for result in results:
        assumed = [result.fits.assumes] if result.fits else []
        for text in dict.fromkeys((*result.warnings, *assumed)):
            said.setdefault(text, []).append(label(result.spec, keys))
    for text, runs in said.items():
        yield f"note: {text}" if len(runs) == len(results) else f"note ({'; '.join(runs)}): {text}"


def _figures(result: RunResult) -> tuple[str, ...]:
    return (
        format_bytes(result.memory.device_peak_bytes),
        format_bytes(result.memory.saved_activation_bytes),
        format_seconds(result.timing.step_seconds),
        format_count(result.timing.tokens_per_second, "tok/s"),
        "out of memory" if result.outcome == "oom" else result.error or _verdict(result.fits) or result.outcome,
    )


def _verdict(fits: Fits | None) -> str | None:
    """`fits`, or by how much it does not."""
    if fits is None:
        return None
    return "fits" if fits.fits else f"{format_bytes(-fits.headroom_bytes)} over"


def jobs_table(jobs: Sequence[Json]) -> None:
    table = Table("id", "status", "runs", "method", "submitted", "name", box=None, pad_edge=False, header_style="bold")
    for job in jobs:
        done = f"{job['runs_done']}/{job['runs_total']}"
        table.add_row(job["id"], job["status"], done, job["method"], job["created_at"][:19], job["name"] or "")
    Console().print(table)


def plan_table(plan: Plan) -> None:
    """The ladder, rung by rung, then the recommendation."""
    table = Table("rung", "fits", box=None, pad_edge=False, header_style="bold")
    for heading in ("peak memory", "step", "tokens per GPU"):
        table.add_column(heading, justify="right")
    for rung in plan.ladder:
        peak, step = format_bytes(rung.device_peak_bytes), format_seconds(rung.step_seconds)
        table.add_row(
            rung.reason, "yes" if rung.fits else "no", peak, step, format_count(rung.tokens_per_second, "tok/s")
        )
    console = Console(highlight=False)
    console.print(table)
    if plan.recommended is not None:
        changed = plan.recommended.spec.model_dump(exclude_defaults=True)
        flags = " ".join(f"--{key.replace('_', '-')} {_word(value)}" for key, value in changed.items())
        console.print(f"\nrecommended: {plan.recommended.reason}\n{flags}", markup=False)
    for note in (*plan.warnings, plan.assumes):
        console.print(f"note: {note}", style="dim", markup=False)
