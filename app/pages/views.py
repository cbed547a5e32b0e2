"""Result and job dictionaries to what the templates show. Pure: no database, no request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from app import tradeoff
from app.charts.bars import Segment, full_width, segments
from app.charts.dimensions import DIMENSIONS, Dimension
from app.charts.figure import METHOD_LABELS
from app.charts.tradeoff import Point, tradeoff_figure
from app.pages.calculator import closed_form
from app.pages.labels import differs, run_label
from engine.spec import RunSpec
from engine.units import format_seconds

Result = Mapping[str, Any]

PEAK = DIMENSIONS["memory.device_peak_bytes"]
SPEED = DIMENSIONS["timing.tokens_per_second"]


def prediction(result: Result) -> tuple[dict[str, Any] | None, str | None]:
    """The closed form of a result's spec as a result dictionary, or why there is none."""
    predicted, missing = closed_form(RunSpec.model_validate(result["spec"]))
    return (None if predicted is None else predicted.model_dump(mode="json")), missing


def percent_off(predicted: float | None, actual: float | None) -> float | None:
    """How far the prediction is from what was measured, in percent of the measured."""
    if predicted is None or not actual:
        return None
    return 100 * (predicted - actual) / actual


def signed_percent(percent: float | None, digits: int = 1) -> str:
    """`+3.5 %`; what rounds to nothing has no sign."""
    if percent is None:
        return "–"
    rounded = round(percent, digits)
    return f"{rounded:+.{digits}f} %" if rounded else f"{0:.{digits}f} %"


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run in a job's results."""

    id: str
    label: str
    outcome: str
    peak: float | None
    predicted: float | None
    error_percent: float | None
    step_seconds: float | None
    tokens_per_second: float | None


def run_row(result: Result, vary: Sequence[str]) -> RunRow:
    predicted, _ = prediction(result)
    peak = PEAK.of(result)
    expected = PEAK.of(predicted) if predicted else None
    return RunRow(
        id=result["id"],
        label=run_label(result["spec"], vary),
        outcome=result["outcome"],
        peak=peak,
        predicted=expected,
        error_percent=percent_off(expected, peak) if result["outcome"] == "ok" else None,
        step_seconds=DIMENSIONS["timing.step_seconds"].of(result),
        tokens_per_second=SPEED.of(result),
    )


@dataclass(frozen=True, slots=True)
class Curve:
    """A tradeoff chart with the words around it."""

    figure: dict[str, Any]
    label: str
    caption: str
    frontier: list[str]
    knee: str | None
    missing: str | None
    """Why there is nothing to draw, instead of the figure; None where there is."""


def curve(
    results: Sequence[Result],
    x: Dimension = PEAK,
    y: Dimension = SPEED,
    *,
    prefix: str = "",
    vary: Sequence[str] = (),
    predictions: bool = True,
    colour: str = "attention",
    log_x: bool = False,
    log_y: bool = False,
) -> Curve:
    """The chart of `results`; with `predictions`, each measured run has its closed form beside it, hollow."""
    points = []
    for result in results:
        href, label = f"{prefix}/runs/{result['id']}", run_label(result["spec"], vary)
        points.append(Point(result, href, label, differs(result["spec"])))
        predicted = prediction(result)[0] if predictions and result["method"] == "measured" else None
        if predicted:
            points.append(Point(predicted, href, label, differs(result["spec"]), of=result))
    front, best = _front(results, x, y)
    made = tradeoff_figure(points, x, y, frontier=front, knee=best, colour=colour, log_x=log_x, log_y=log_y)
    return Curve(
        figure=made,
        label=f"{y.label} against {x.label.lower()}, {len(results)} runs",
        caption=_caption(points, y),
        frontier=front,
        knee=best,
        missing=_missing(points, x, y, {result["outcome"] for result in results}),
    )


_ENDS = {
    frozenset({"oom"}): ": all ran out of memory",
    frozenset({"failed"}): ": all failed",
    frozenset({"oom", "failed"}): ": all failed or ran out of memory",
}


def _missing(points: Sequence[Point], x: Dimension, y: Dimension, outcomes: Set[str]) -> str | None:
    """What keeps every one of these runs off the chart. A run out of memory alone makes no chart: it has no speed."""
    alive = [point for point in points if point.result["outcome"] == "ok"]
    for dimension, at in ((y, Point.y), (x, Point.x)):
        if all(at(point, dimension) is None for point in alive):
            return f"None of these runs has {_in_a_sentence(dimension)}{_ENDS.get(frozenset(outcomes), '')}."
    if all(point.x(x) is None or point.y(y) is None for point in alive):
        return f"None of these runs has both {_in_a_sentence(x)} and {_in_a_sentence(y)}."
    return None


def _in_a_sentence(dimension: Dimension) -> str:
    label = dimension.label
    return label if label[:2].isupper() else label[0].lower() + label[1:]


def _front(results: Sequence[Result], x: Dimension, y: Dimension) -> tuple[list[str], str | None]:
    """Ids of the Pareto frontier, and of its knee where that is worth pointing at, of the runs that ended well."""
    known = [
        tradeoff.Point(result["id"], at_x, at_y)
        for result in results
        if result["outcome"] == "ok" and (at_x := x.of(result)) is not None and (at_y := y.of(result)) is not None
    ]
    better = {"x_up": tradeoff.more_is_better(x.key), "y_up": tradeoff.more_is_better(y.key)}
    front = tradeoff.frontier(known, **better)
    best = tradeoff.knee(known, **better) if tradeoff.bends(front) else None
    return [point.id for point in front], best.id if best else None


def _caption(points: Sequence[Point], y: Dimension) -> str:
    known = {point.result["method"] for point in points}
    methods = [label for method, label in METHOD_LABELS.items() if method in known]
    parts = [f"Known by: {', '.join(methods)}. The shape is the checkpoint policy."]
    if any(point.of for point in points):
        parts.append("Hollow: predicted by the closed form, joined to the run it predicts.")
    if any(point.of and y.of(point.result) is None for point in points):
        parts.append(f"It does not predict {y.label.lower()}, so a hollow point stands at its run's height.")
    if any(point.kind == "oom" for point in points):
        parts.append("A cross ran out of memory: it stands at its limit.")
    return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Bar:
    """One method's peak on the run page."""

    method: str
    peak: float | None
    segments: list[Segment]
    error_percent: float | None
    missing: str | None


def peak_bars(results: Sequence[Result], missing: str | None) -> list[Bar]:
    """A bar for each result of one spec, the first being the reference of the errors."""
    full = full_width([PEAK.of(result) or 0 for result in results], None)
    own = PEAK.of(results[0])
    bars = [
        Bar(
            result["method"],
            peak := PEAK.of(result),
            segments((result["memory"] or {}).get("at_peak"), full),
            percent_off(peak, own) if index and results[0]["outcome"] == "ok" else None,
            None if peak is not None else "no peak: the run ended before it was known",
        )
        for index, result in enumerate(results)
    ]
    return [*bars, Bar("closed-form", None, [], None, missing)] if missing else bars


def time_left(done_seconds: Sequence[float], remaining: int) -> str:
    """An honest estimate: the range of this job's own finished runs; unknown before the first has ended."""
    if not remaining:
        return "–"
    if not done_seconds:
        return "unknown"
    low, high = (format_seconds(extreme(done_seconds) * remaining) for extreme in (min, max))
    return f"about {low}" if low == high else f"{low} to {high}"


def run_durations(started_at: str | datetime | None, ended_at: Sequence[str | datetime]) -> list[float]:
    """Seconds each finished run took: runs go one after another, so from the end of the one before."""
    if started_at is None:
        return []
    times = [_time(started_at), *sorted(_time(moment) for moment in ended_at)]
    return [seconds for a, b in pairwise(times) if (seconds := (b - a).total_seconds()) > 0]


def _time(moment: str | datetime) -> datetime:
    return datetime.fromisoformat(moment) if isinstance(moment, str) else moment
