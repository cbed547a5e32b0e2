"""Predicted against true bytes, one point a comparison; on the diagonal a prediction is exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.charts.figure import SERIES, Figure, axis, figure, text
from engine.units import GIB, format_bytes

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "star", "hexagon")


def accuracy_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Log-log, a series a group."""
    groups = list(dict.fromkeys(row["group"] for row in rows))
    ends = [min(row["actual_bytes"] for row in rows) / GIB, max(row["actual_bytes"] for row in rows) / GIB]
    exact = {
        "type": "scatter", "mode": "lines", "name": "exact", "x": ends, "y": ends, "hoverinfo": "skip",
        "line": {"color": "--muted", "dash": "dot", "width": 1.5},
    }  # fmt: skip
    traces = [exact, *(_series(number, group, rows) for number, group in enumerate(groups))]
    return figure(traces, axis("True (GiB)", log=True), axis("Predicted (GiB)", log=True))


def _series(number: int, group: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    members = [row for row in rows if row["group"] == group]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": text(group),
        "x": [row["actual_bytes"] / GIB for row in members],
        "y": [row["predicted_bytes"] / GIB for row in members],
        "text": [_hover(row) for row in members],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"symbol": SYMBOLS[number % len(SYMBOLS)], "size": 8, "color": SERIES[number % len(SERIES)]},
    }


def _hover(row: Mapping[str, Any]) -> str:
    true, predicted = format_bytes(row["actual_bytes"]), format_bytes(row["predicted_bytes"])
    return f"{text(row['label'])}<br>predicted {predicted}, true {true}: {row['error']:+.2%}"
