"""The tradeoff curve: what each run needs against how fast it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import log10
from typing import Any

from app.charts.dimensions import Dimension, Scale, axis_scale
from app.charts.figure import METHOD_LABELS, SERIES, Figure, axis, figure, symbol, text
from engine.units import GIB

Result = Mapping[str, Any]

HOVER_LINES = 14  # spec fields listed on hover; the run's page has them all


@dataclass(frozen=True, slots=True)
class Point:
    """One run on the chart. A prediction that does not know the speed stands at `measured_y`, the run's own."""

    result: Result
    href: str
    label: str
    differs: Mapping[str, Any] = field(default_factory=dict)
    """The spec fields that are not the default: what hover shows."""
    measured_y: float | None = None

    @property
    def method(self) -> str:
        return str(self.result["method"])

    @property
    def checkpointing(self) -> str:
        return str(self.result["spec"]["checkpointing"])


def tradeoff_figure(
    points: Sequence[Point],
    x: Dimension,
    y: Dimension,
    *,
    frontier: Sequence[str] = (),
    knee: str | None = None,
    colour: str = "attention",
    log_x: bool = False,
    log_y: bool = False,
) -> Figure:
    """A scatter plot of `points`. `frontier` and `knee` are ids of measured results; `colour` names a spec field.

    Shape tells the checkpoint policy, colour the field, a hollow marker a prediction, a cross a run out of memory.
    """
    ran = [point for point in points if point.result["outcome"] != "failed"]
    x_scale = axis_scale(x, [value for point in ran if (value := _x(point, x)) is not None])
    y_scale = axis_scale(y, [value for point in ran if (value := _y(point, y)) is not None])
    groups = sorted({str(point.result["spec"].get(colour)) for point in ran})
    colours = {name: SERIES[index % len(SERIES)] for index, name in enumerate(groups)}

    def series_key(point: Point) -> tuple[str, str, str, str]:
        kind = "oom" if point.result["outcome"] == "oom" else point.method
        return point.checkpointing, str(point.result["spec"].get(colour)), kind, point.label

    drawn = [point for point in ran if point.result["outcome"] == "oom" or _y(point, y) is not None]
    drawn = sorted((point for point in drawn if _x(point, x) is not None), key=series_key)
    floor = _floor([value for point in ran if (value := _y(point, y)) is not None], log_y) / y_scale.size
    named: set[str] = set()
    traces = []
    for (policy, group, kind), members in groupby(drawn, key=lambda point: series_key(point)[:3]):
        name = f"{policy} · {group}" if len(groups) > 1 else policy
        legend = f"{name} (out of memory)" if kind == "oom" else name
        trace = _trace(list(members), x, y, x_scale, y_scale, floor, kind, colours[group], policy)
        traces.append(trace | {"name": text(legend), "legendgroup": text(legend), "showlegend": legend not in named})
        named.add(legend)
    traces[:0] = _frontier(points, frontier, x, y, x_scale, y_scale)
    return figure(
        traces,
        axis(f"{x.label} ({x_scale.unit})" if x_scale.unit else x.label, log=log_x),
        axis(f"{y.label} ({y_scale.unit})" if y_scale.unit else y.label, log=log_y, zero=True),
        annotations=_knee(points, knee, x, y, x_scale, y_scale, log_x, log_y),
    )


def _x(point: Point, x: Dimension) -> float | None:
    """Where the point stands; a run that died of memory stands at its cap when its peak is not known."""
    value = x.of(point.result)
    if value is None and point.result["outcome"] == "oom" and x.key == "memory.device_peak_bytes":
        limit = point.result["spec"].get("memory_limit_gib")
        return limit * GIB if limit else None
    return value


def _y(point: Point, y: Dimension) -> float | None:
    value = y.of(point.result)
    return point.measured_y if value is None and point.method != "measured" else value


def _floor(values: Sequence[float], log: bool) -> float:
    """Where runs without a speed (out of memory) stand: on the axis, or under the slowest on a logarithmic one."""
    return min((value for value in values if value > 0), default=1) / 1.5 if log else 0


def _trace(
    members: list[Point],
    x: Dimension,
    y: Dimension,
    x_scale: Scale,
    y_scale: Scale,
    floor: float,
    kind: str,
    colour: str,
    policy: str,
) -> dict[str, Any]:
    xs = [(_x(point, x) or 0) / x_scale.size for point in members]
    ys = [floor if (value := _y(point, y)) is None else value / y_scale.size for point in members]
    hollow = kind != "measured"
    shape = "x-thin" if kind == "oom" else symbol(policy, hollow)
    line = {
        "width": 3 if kind == "oom" else 2 if hollow else 1,
        "color": "--bad" if kind == "oom" else colour if hollow else "--paper",
    }
    return {
        "type": "scatter",
        "mode": "markers",
        "x": xs,
        "y": ys,
        "customdata": [point.href for point in members],
        "hovertext": [_hover(point, x, y) for point in members],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "cliponaxis": False,
        "marker": {"symbol": shape, "size": 12, "color": colour, "opacity": 1, "line": line},
    }


def _hover(point: Point, x: Dimension, y: Dimension) -> str:
    borrowed = y.of(point.result) is None and point.measured_y is not None and point.method != "measured"
    outcome = " · out of memory" if point.result["outcome"] == "oom" else ""
    lines = [
        f"<b>{text(point.label)}</b>",
        f"{METHOD_LABELS[point.method]}{outcome}",
        f"{text(x.label)}: {text(x.show(_x(point, x)))}",
        f"{text(y.label)}: {text(y.show(_y(point, y)))}{' (as measured: not predicted)' if borrowed else ''}",
        *(f"{text(key)} = {text(str(value)[:60])}" for key, value in list(point.differs.items())[:HOVER_LINES]),
    ]
    return "<br>".join(lines)


def _frontier(
    points: Sequence[Point], ids: Sequence[str], x: Dimension, y: Dimension, x_scale: Scale, y_scale: Scale
) -> list[dict[str, Any]]:
    chosen = [point for point in points if point.result["id"] in set(ids)]
    pairs = sorted((x.of(p.result), y.of(p.result)) for p in chosen if None not in (x.of(p.result), y.of(p.result)))
    if len(pairs) < 2:
        return []
    line = {"color": "--muted", "width": 1.5, "dash": "dot"}
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "x": [(first or 0) / x_scale.size for first, _ in pairs],
            "y": [(second or 0) / y_scale.size for _, second in pairs],
            "name": "Pareto front",
            "hoverinfo": "skip",
            "line": line,
        }
    ]


def _knee(
    points: Sequence[Point],
    knee: str | None,
    x: Dimension,
    y: Dimension,
    x_scale: Scale,
    y_scale: Scale,
    log_x: bool,
    log_y: bool,
) -> list[dict[str, Any]]:
    found = next((point for point in points if point.result["id"] == knee), None)
    if found is None or (at_x := x.of(found.result)) is None or (at_y := y.of(found.result)) is None:
        return []
    at_x, at_y = at_x / x_scale.size, at_y / y_scale.size
    return [
        {
            "x": log10(at_x) if log_x and at_x > 0 else at_x,
            "y": log10(at_y) if log_y and at_y > 0 else at_y,
            "text": "knee: the best trade",
            "showarrow": True,
            "arrowcolor": "--muted",
            "arrowhead": 0,
            "ax": 46,
            "ay": 36,
            "font": {"size": 12, "color": "--muted"},
        }
    ]
