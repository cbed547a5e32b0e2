"""The tradeoff curve: what each run needs against how fast it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from app.charts.dimensions import Dimension, Scale, axis_scale
from app.charts.figure import METHOD_LABELS, SERIES, Figure, axis, figure, symbol, text
from engine.units import GIB

Result = Mapping[str, Any]
Trace = dict[str, Any]
Kind = Literal["measured", "simulated", "closed-form", "oom"]

KINDS: tuple[Kind, ...] = ("measured", "simulated", "closed-form", "oom")  # as the legend names them
HOVER_LINES = 14  # spec fields listed on hover; the run's page has them all


@dataclass(frozen=True, slots=True)
class Point:
    """One run on the chart, or the prediction of one. A prediction that does not know the speed stands at its run's."""

    result: Result
    href: str
    label: str
    differs: Mapping[str, Any] = field(default_factory=dict)
    """The spec fields that are not the default: what hover shows."""
    of: Result | None = None
    """The measured run that this point predicts."""

    @property
    def kind(self) -> Kind:
        method: Kind = self.result["method"]
        return "oom" if self.result["outcome"] == "oom" else method

    @property
    def policy(self) -> str:
        return str(self.result["spec"]["checkpointing"])

    def x(self, dimension: Dimension) -> float | None:
        """A run that died of memory stands at its cap when its peak is not known."""
        value = dimension.of(self.result)
        limit = self.result["spec"].get("memory_limit_gib")
        if value is None and self.kind == "oom" and limit and dimension.key == "memory.device_peak_bytes":
            return float(limit) * GIB
        return value

    def y(self, dimension: Dimension) -> float | None:
        value = dimension.of(self.result)
        return dimension.of(self.of) if value is None and self.of else value


@dataclass(frozen=True, slots=True)
class Plane:
    """The two axes and the units they are drawn in. `floor` is where a run without a speed stands."""

    x: Dimension
    y: Dimension
    x_scale: Scale
    y_scale: Scale
    floor: float

    def place(self, point: Point) -> tuple[float, float]:
        """Drawn coordinates of a point whose x is known."""
        x, y = point.x(self.x), point.y(self.y)
        return (x or 0) / self.x_scale.size, self.floor if y is None else y / self.y_scale.size

    def shows(self, point: Point) -> bool:
        return point.x(self.x) is not None and (point.kind == "oom" or point.y(self.y) is not None)


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
    """A scatter plot of `points`. `frontier` and `knee` are ids of results; `colour` names a spec field.

    Shape tells the checkpoint policy, colour the field, a hollow marker a prediction, a cross a run out of memory.
    """
    plane = _plane([point for point in points if point.result["outcome"] != "failed"], x, y, log_y)
    drawn = [point for point in points if point.result["outcome"] != "failed" and plane.shows(point)]
    by_id = {point.result["id"]: point for point in drawn}
    traces = [
        *_frontier([by_id[key] for key in frontier if key in by_id], plane),
        *_links(drawn, plane),
        *_markers(drawn, plane, colour),
        *_knee(by_id.get(knee or ""), plane),
    ]
    places = [plane.place(point) for point in drawn]
    across = _axis(x, plane.x_scale, [place[0] for place in places], log_x)
    up = _axis(y, plane.y_scale, [place[1] for place in places], log_y, zero=True)
    return figure(traces, across, up)


def _plane(points: Sequence[Point], x: Dimension, y: Dimension, log_y: bool) -> Plane:
    xs = [value for point in points if (value := point.x(x)) is not None]
    ys = [value for point in points if (value := point.y(y)) is not None]
    y_scale = axis_scale(y, ys)
    lowest = min((value for value in ys if value > 0), default=y_scale.size) / y_scale.size
    return Plane(x, y, axis_scale(x, xs), y_scale, floor=lowest / 1.5 if log_y else 0)


def _axis(dimension: Dimension, scale: Scale, values: Sequence[float], log: bool, zero: bool = False) -> dict[str, Any]:
    title = f"{dimension.label} ({scale.unit})" if scale.unit else dimension.label
    return axis(title, values, log=log, zero=zero, whole=dimension.kind == "count")


def _markers(drawn: Sequence[Point], plane: Plane, colour: str) -> list[Trace]:
    """One trace a policy, colour and kind; the legend names each policy and colour once."""
    groups = sorted({_group(point, colour) for point in drawn})
    colours = {name: SERIES[index % len(SERIES)] for index, name in enumerate(groups)}

    def series(point: Point) -> tuple[str, str, int]:
        return point.policy, _group(point, colour), KINDS.index(point.kind)

    traces: list[Trace] = []
    for (policy, group, kind), members in groupby(sorted(drawn, key=series), key=series):
        name = f"{policy} · {group}" if len(groups) > 1 else policy
        legend = text(f"{name} (out of memory)" if KINDS[kind] == "oom" else name)
        named = any(trace["name"] == legend for trace in traces)
        trace = _trace(list(members), plane, KINDS[kind], colours[group])
        traces.append(trace | {"name": legend, "legendgroup": legend, "showlegend": not named})
    return traces


def _group(point: Point, colour: str) -> str:
    return str(point.result["spec"].get(colour))


def _trace(members: Sequence[Point], plane: Plane, kind: Kind, colour: str) -> Trace:
    places = [plane.place(point) for point in members]
    hollow = kind not in ("measured", "oom")
    outline = {"oom": ("--bad", 3), "measured": ("--surface", 1)}.get(kind, (colour, 2))
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [x for x, _ in places],
        "y": [y for _, y in places],
        "customdata": [point.href for point in members],
        "hovertext": [_hover(point, plane) for point in members],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "cliponaxis": False,
        "marker": {
            "symbol": "x-thin" if kind == "oom" else symbol(members[0].policy, hollow),
            "size": 16 if hollow else 11,  # an exact prediction shows as an outline around its run
            "color": colour,
            "opacity": 1,
            "line": {"color": outline[0], "width": outline[1]},
        },
    }


def _hover(point: Point, plane: Plane) -> str:
    x, y = plane.x, plane.y
    borrowed = y.of(point.result) is None and point.y(y) is not None
    outcome = " · out of memory" if point.kind == "oom" else ""
    lines = [
        f"<b>{text(point.label)}</b>",
        f"{METHOD_LABELS[point.result['method']]}{outcome}",
        f"{text(x.label)}: {text(x.show(point.x(x)))}",
        f"{text(y.label)}: {text(y.show(point.y(y)))}{' (as measured: not predicted)' if borrowed else ''}",
        *(f"{text(key)} = {text(str(value)[:60])}" for key, value in list(point.differs.items())[:HOVER_LINES]),
    ]
    return "<br>".join(lines)


def _line(xs: list[float | None], ys: list[float | None], colour: str, width: float, dash: str) -> Trace:
    line = {"color": colour, "width": width, "dash": dash}
    return {"type": "scatter", "mode": "lines", "x": xs, "y": ys, "hoverinfo": "skip", "line": line}


def _links(drawn: Sequence[Point], plane: Plane) -> list[Trace]:
    """A thin line from each prediction to the run it predicts: its length is the error."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    for point in drawn:
        run = Point(point.of, "", "") if point.of else None
        if run is not None and plane.shows(run):
            (x0, y0), (x1, y1) = plane.place(point), plane.place(run)
            xs += [x0, x1, None]
            ys += [y0, y1, None]
    return [_line(xs, ys, "--line-strong", 1, "solid") | {"showlegend": False}] if xs else []


def _frontier(members: Sequence[Point], plane: Plane) -> list[Trace]:
    places = sorted(plane.place(point) for point in members)
    if len(places) < 2:
        return []
    line = _line([x for x, _ in places], [y for _, y in places], "--muted", 1.5, "dot")
    return [line | {"name": "Pareto front"}]


def _knee(point: Point | None, plane: Plane) -> list[Trace]:
    """A ring around the front's best trade."""
    if point is None:
        return []
    x, y = plane.place(point)
    ring = {"symbol": "circle-open", "size": 28, "color": "--accent", "line": {"color": "--accent", "width": 2}}
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [x],
            "y": [y],
            "marker": ring,
            "name": "knee: the best trade",
            "hoverinfo": "skip",
            "cliponaxis": False,
        }
    ]
