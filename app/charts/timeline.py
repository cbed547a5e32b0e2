"""Live bytes over one step, stacked by category, with the peak and the phases marked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.charts.dimensions import Dimension, axis_scale
from app.charts.figure import CATEGORIES, CATEGORY_COLOURS, Figure, axis, figure, text
from engine.units import format_bytes

_BYTES = Dimension("live", "Live memory", "bytes")


def timeline_figure(timeline: Mapping[str, Any]) -> Figure:
    """A stacked area chart from a Timeline dictionary."""
    xs = timeline["x"]
    totals = [sum(values) for values in zip(*(timeline[key] for key in CATEGORIES), strict=True)]
    scale = axis_scale(_BYTES, totals)
    milliseconds = timeline["x_unit"] == "seconds" and max(xs, default=0) < 10
    factor = 1e3 if milliseconds else 1
    title = (
        ("Time in the step (ms)" if milliseconds else "Time in the step (s)")
        if timeline["x_unit"] == "seconds"
        else "Allocator events"
    )
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "live",
            "name": label,
            "x": [x * factor for x in xs],
            "y": [value / scale.size for value in timeline[key]],
            "text": [format_bytes(value) for value in timeline[key]],
            "hovertemplate": f"{label}: %{{text}}<extra></extra>",
            "line": {"width": 0.5, "shape": "hv", "color": CATEGORY_COLOURS[key]},
            "fillcolor": CATEGORY_COLOURS[key],
        }
        for key, label in CATEGORIES.items()
        if any(timeline[key])
    ]
    return figure(
        traces,
        axis(title),
        axis(f"Live memory ({scale.unit})", zero=True),
        hovermode="x unified",
        shapes=[_divider(phase, factor) for phase in timeline["phases"][1:]],
        annotations=[
            *(_phase(phase, factor) for phase in timeline["phases"]),
            *_peak(timeline, totals, factor, scale.size),
        ],
    )


def _divider(phase: Mapping[str, Any], factor: float) -> dict[str, Any]:
    at = phase["start"] * factor
    return {
        "type": "line",
        "x0": at,
        "x1": at,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"color": "--line-strong", "width": 1, "dash": "dot"},
    }


def _phase(phase: Mapping[str, Any], factor: float) -> dict[str, Any]:
    middle = (phase["start"] + phase["end"]) / 2 * factor
    return {
        "x": middle,
        "y": 0,
        "yref": "paper",
        "yanchor": "bottom",
        "text": text(phase["name"]),
        "showarrow": False,
        "font": {"size": 11, "color": "--ink"},
        "bgcolor": "--surface",
        "opacity": 0.85,
    }


def _peak(timeline: Mapping[str, Any], totals: list[int], factor: float, size: float) -> list[dict[str, Any]]:
    index = timeline["peak_index"]
    if not 0 <= index < len(totals):
        return []
    return [
        {
            "x": timeline["x"][index] * factor,
            "y": totals[index] / size,
            "text": f"peak {format_bytes(totals[index])}",
            "showarrow": True,
            "arrowhead": 2,
            "arrowcolor": "--bad",
            "ax": 0,
            "ay": -26,
            "font": {"size": 12, "color": "--bad"},
        }
    ]
