"""Figures of the exercise and Learn pages as numbers that templates draw as SVG: no script, no style attribute, one
palette (static/app.css). Each curve is laid out twice, for wide and for narrow screens, so that text keeps its size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from app.charts.figure import CATEGORIES
from engine.exercises.exercise import Bars, Lines, Series, Unit
from engine.units import GIB, KIB, MIB, format_bytes, format_count, format_seconds

Size = tuple[int, int]

WIDE, NARROW, ACROSS = (680, 360), (340, 300), (1080, 360)
"""Papers: beside a form, on a phone, over the whole page."""
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 44


def show(value: float | str | None, unit: Unit | None) -> str:
    """A value as a person reads it; words stand for themselves."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if unit == "B":
        return format_bytes(value)
    if unit == "s":
        return format_seconds(value)
    if unit == "fraction":
        return f"{100 * value:.1f} %"
    if unit == "B/s":
        return f"{value / 1e9:,.1f} GB/s"
    if unit == "parameters":
        return f"{value / 1e9:,.2f} billion"
    if unit == "FLOP":
        return format_count(value, "FLOP")
    shown = f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"
    return f"{shown} {unit}" if unit in ("layers", "tokens") else shown


def show_both(value: float | None, unit: Unit | None) -> str:
    """Bytes in both systems; anything else as `show`."""
    if unit == "B" and value is not None and abs(value) >= KIB:
        return f"{format_bytes(value)} = {format_count(value, 'B')}"
    return show(value, unit)


@dataclass(frozen=True, slots=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Mark:
    x: float
    y: float
    title: str
    label: str
    """Written beside the point; empty for none."""
    anchor: str


@dataclass(frozen=True, slots=True)
class Drawn:
    """One series on the paper: `path` for lines, `marks` for points; `colour` is 1…6."""

    name: str
    style: str
    colour: int
    path: str
    marks: list[Mark]


@dataclass(frozen=True, slots=True)
class Plot:
    size: str
    width: int
    height: int
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    series: list[Drawn]

    left, right, top, bottom = LEFT, RIGHT, TOP, BOTTOM


@dataclass(frozen=True, slots=True)
class Curves:
    """A line figure: the same curves on two papers, and the legend and axis names they share."""

    title: str
    x_label: str
    y_label: str
    plots: list[Plot]
    source: Lines


class _Axis:
    """Data to paper along one axis."""

    def __init__(self, values: Iterable[float], log: bool, start: float, end: float, unit: Unit) -> None:
        found = list(values)
        self.log, self.start, self.end, self.unit = log, start, end, unit
        low, high = min(found), max(found)
        if log:
            low, high = max(low, 1e-12) / 1.06, high * 1.06
        else:
            low, high = min(low, 0), high * 1.05 or 1
        self.low, self.high = (low, high) if low < high else (low - 1, high + 1)

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-12))
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 2)

    def ticks(self, count: int) -> list[Tick]:
        chosen = self._log_ticks(count) if self.log else self._linear_ticks(count)
        return [Tick(self(value), self._label(value)) for value in chosen]

    def _scale(self) -> float:
        sizes = (2**40, GIB, MIB, KIB) if self.unit == "B" else ()
        return next((size for size in sizes if self.high >= size), 1)

    def _linear_ticks(self, count: int) -> list[float]:
        scale = self._scale()
        span = (self.high - self.low) / scale / count
        power = 10 ** math.floor(math.log10(span))
        step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= span) * scale
        if self.unit in ("layers", "tokens"):
            step = max(1, round(step))
        first = math.ceil(self.low / step)
        return [n * step for n in range(first, math.floor(self.high / step) + 1)]

    def _log_ticks(self, count: int) -> list[float]:
        powers = [2.0**n for n in range(math.ceil(math.log2(self.low)), math.floor(math.log2(self.high)) + 1)]
        every = max(1, math.ceil(len(powers) / count))
        return powers[::every]

    def _label(self, value: float) -> str:
        if value == 0:
            return "0"
        shown = show(value, "ratio" if self.unit in ("layers", "tokens") else self.unit)
        return shown.replace(".00 ", " ").replace(".0 ", " ")


def curves(lines: Lines, wide: Size = WIDE) -> Curves:
    """Lay a line figure out on a wide and on a narrow paper."""
    return Curves(
        lines.title,
        lines.x_label,
        lines.y_label,
        [_plot(lines, "wide", *wide), _plot(lines, "narrow", *NARROW)],
        lines,
    )


def _plot(lines: Lines, size: str, width: int, height: int) -> Plot:
    points = [point for series in lines.series for point in series.points]
    x = _Axis((px for px, _ in points), lines.log_x, LEFT, width - RIGHT, lines.x_unit)
    y = _Axis((py for _, py in points), lines.log_y, height - BOTTOM, TOP, lines.y_unit)
    return Plot(
        size,
        width,
        height,
        x.ticks(8 if size == "wide" else 5),
        y.ticks(6),
        [_drawn(lines, each, index % 6 + 1, x, y, width) for index, each in enumerate(lines.series)],
    )


def _drawn(lines: Lines, series: Series, colour: int, x: _Axis, y: _Axis, width: int) -> Drawn:
    placed = [(x(px), y(py)) for px, py in series.points]
    path = ""
    if series.style in ("line", "dashed") and placed:
        path = "M" + "L".join(f"{px},{py}" for px, py in placed)
    marks = []
    if series.style in ("points", "hollow", "mark"):
        for index, ((px, py), (vx, vy)) in enumerate(zip(placed, series.points, strict=True)):
            name = series.labels[index] if index < len(series.labels) else series.name
            title = f"{name}: {show(vy, lines.y_unit)} at {show(vx, lines.x_unit)}"
            label = name if series.style == "mark" else ""
            marks.append(Mark(px, py, title, label, "end" if px > width * 0.7 else "start"))
    return Drawn(series.name, series.style, colour, path, marks)


@dataclass(frozen=True, slots=True)
class Piece:
    fill: str
    x: float
    width: float
    title: str


@dataclass(frozen=True, slots=True)
class DrawnBar:
    label: str
    pieces: list[Piece]
    total: str
    parts: list[str]


@dataclass(frozen=True, slots=True)
class StackedBars:
    title: str
    bars: list[DrawnBar]
    legend: list[tuple[str, str]]
    """(fill class, name)"""
    limits: list[tuple[float, str]]
    """(place in percent, name); those beyond the paper are left out."""
    columns: list[str]


def stacked(bars: Bars) -> StackedBars:
    """Lay stacked bars out, in percent of the widest one."""
    totals = [sum(value for _, value in bar.parts) for bar in bars.bars]
    limits = [value for _, value in bars.limits]
    full = max([*totals, *(limit for limit in limits if limit <= 1.3 * max(totals))], default=1) * 1.02 or 1
    names = list(dict.fromkeys(part for bar in bars.bars for part, _ in bar.parts))
    fills = {
        name: f"fill-{name}" if name in CATEGORIES else f"fill-part-{index}" for index, name in enumerate(names, 1)
    }
    return StackedBars(
        bars.title,
        [_bar(bar.label, bar.parts, fills, full, bars.unit) for bar in bars.bars],
        [(fills[name], CATEGORIES.get(name, name)) for name in names],
        [(round(100 * value / full, 3), label) for label, value in bars.limits if value <= full],
        [CATEGORIES.get(name, name) for name in names],
    )


def _bar(label: str, parts: Sequence[tuple[str, float]], fills: dict[str, str], full: float, unit: Unit) -> DrawnBar:
    pieces, at = [], 0.0
    for name, value in parts:
        width = 100 * value / full
        if width > 0:
            title = f"{CATEGORIES.get(name, name)}: {show(value, unit)}"
            pieces.append(Piece(fills[name], round(at, 3), round(width, 3), title))
        at += width
    total = sum(value for _, value in parts)
    return DrawnBar(label, pieces, show(total, unit), [show(value, unit) for _, value in parts])


def figure(chart: Lines | Bars) -> Curves | StackedBars:
    return curves(chart) if isinstance(chart, Lines) else stacked(chart)
