"""Two to six runs side by side: numbers against the first, and only what differs of the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from app.charts.dimensions import DIMENSIONS, Dimension
from app.pages.labels import full_spec
from engine.spec import RunSpec

Result = Mapping[str, Any]
Verdict = Literal["better", "worse", "same", "missing"]

LEAST, MOST = 2, 6
OF_THE_SPEC = {"attention_kernel", "kernels"}
"""Recorded with the environment, but chosen by the specification."""
PER_TOKEN = ("rate", "fraction")
"""Kinds of numbers that stay comparable when a step of one run has more tokens than another's."""
MEMORY_NOISE, SPEED_NOISE = 0.001, 0.03
"""Relative differences that are not told apart when a run's own spread is not known."""


@dataclass(frozen=True, slots=True)
class Cell:
    shown: str
    delta: str = ""
    verdict: Verdict = "missing"


@dataclass(frozen=True, slots=True)
class NumberRow:
    label: str
    cells: list[Cell]


def number_rows(results: Sequence[Result]) -> list[NumberRow]:
    """One row for each quantity that at least one run knows."""
    rows = []
    for dimension in DIMENSIONS.values():
        values = [dimension.of(result) for result in results]
        if any(value is not None for value in values) and not dimension.key.startswith("spec."):
            cells = [_cell(dimension, value, values[0], index, results) for index, value in enumerate(values)]
            rows.append(NumberRow(dimension.label, cells))
    return rows


def same_tokens(results: Sequence[Result]) -> bool:
    """Whether a step of each of these runs processes equally many tokens."""
    return len({RunSpec.model_validate(result["spec"]).tokens_per_step for result in results}) == 1


def _cell(dimension: Dimension, value: float | None, base: float | None, index: int, results: Sequence[Result]) -> Cell:
    shown = dimension.show(value)
    if not index or value is None or not base:
        return Cell(shown)
    change = (value - base) / base
    if abs(change) <= max(_noise(dimension, results[0]), _noise(dimension, results[index])):
        return Cell(shown, "no difference" if not change else f"{change:+.1%}, within noise", "same")
    if dimension.better is None or (dimension.kind not in PER_TOKEN and not same_tokens(results)):
        return Cell(shown, f"{change:+.1%}", "same")
    good = (change < 0) == (dimension.better == "lower")
    return Cell(shown, f"{change:+.1%} {'better' if good else 'worse'}", "better" if good else "worse")


def _noise(dimension: Dimension, result: Result) -> float:
    """The relative spread below which this run's number says nothing."""
    if not dimension.key.startswith("timing.") or dimension.kind == "flops":
        return MEMORY_NOISE
    timing = result["timing"]
    step, low, high = (timing.get(key) for key in ("step_seconds", "step_seconds_p20", "step_seconds_p80"))
    return (high - low) / step if step and low is not None and high is not None else SPEED_NOISE


def differing(tables: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """(key, one text a run) for every key on which the mappings do not agree."""
    keys = list(dict.fromkeys(key for table in tables for key in table))
    rows = [(key, [str(table.get(key, "–")) for table in tables]) for key in keys if key not in OF_THE_SPEC]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def spec_rows(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    return differing([{key: value for key, value, _ in full_spec(result["spec"])} for result in results])


def environment_rows(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    """Differences between the environments of the runs that have one (a closed form has none). Bandwidths are left out:
    they are measured, and differ a little each time."""
    found = differing([result.get("environment") or {} for result in results])
    return [(key, values) for key, values in found if not key.endswith("_bytes_per_second")]
