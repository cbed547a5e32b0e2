"""What the command line shows: one JSON line a result for programs, a table and progress for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from app.fields import spell
from engine.planning import Plan
from engine.result import RunResult
from engine.units import format_bytes, format_count, format_seconds

Json = Mapping[str, Any]


def json_line(result: RunResult) -> None:
    """One RunResult on stdout, at once: the next run may take minutes."""
    print(result.model_dump_json(), flush=True)


def differing(results: Sequence[RunResult]) -> list[str]:
    """The spec fields that are not the same in all results."""
    specs = [result.spec.model_dump() for result in results]
    return [key for key in specs[0] if any(spec[key] != specs[0][key] for spec in specs)] if specs else []


def label(result: RunResult, keys: Iterable[str]) -> str:
    """`per-layer, flash`; a single run is named by its model."""
    values = [getattr(result.spec, key) for key in keys]
    return ", ".join(map(_word, values)) or _model(result)


def _word(value: Any) -> str:
    """What is typed for it on a command line; a config object came from a file."""
    return "config.json" if isinstance(value, dict) else spell(value)


def _model(result: RunResult) -> str:
    return _word(result.spec.model)


def results_table(results: Sequence[RunResult]) -> None:
    """The results side by side on stdout."""
    keys = differing(results)
    table = Table(*(keys or ["model"]), title=None, box=None, pad_edge=False, header_style="bold")
    for heading in ("peak memory", "saved", "step", "tokens", "outcome"):
        table.add_column(heading, justify="left" if heading == "outcome" else "right")
    for result in results:
        table.add_row(*(label(result, [key]) for key in keys or ["model"]), *_figures(result))
    console = Console()
    console.print(table)
    for warning in dict.fromkeys(warning for result in results for warning in result.warnings):
        console.print(f"note: {warning}", style="dim", markup=False, highlight=False)


def _figures(result: RunResult) -> tuple[str, ...]:
    return (
        format_bytes(result.memory.device_peak_bytes),
        format_bytes(result.memory.saved_activation_bytes),
        format_seconds(result.timing.step_seconds),
        format_count(result.timing.tokens_per_second, "tok/s"),
        "out of memory" if result.outcome == "oom" else result.error or result.outcome,
    )


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
