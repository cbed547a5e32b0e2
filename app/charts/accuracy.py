"""Predicted against true values, one point a comparison; on the diagonal a prediction is exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.charts.figure import SERIES, Figure, axis, figure, text
from engine.units import GIB, format_bytes, format_count


@dataclass(frozen=True, slots=True)
class Quantity:
    """How a report's unit is drawn and written."""

    key: str
    name: str
    scale: float
    write: Callable[[float], str]


QUANTITIES = {
    "bytes": Quantity("bytes", "GiB", GIB, format_bytes),
    "tokens_per_second": Quantity(
        "tokens_per_second", "tokens/s", 1.0, lambda count: f"{format_count(count)} tokens/s"
    ),
}

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "star", "hexagon")


def accuracy_figure(rows: Sequence[Mapping[str, Any]], unit: str = "bytes") -> Figure:
    """Log-log, a series a group."""
    quantity = QUANTITIES[unit]
    groups = list(dict.fromkeys(row["group"] for row in rows))
    actual = [row[f"actual_{unit}"] / quantity.scale for row in rows]
    ends = [min(actual), max(actual)]
    exact = {
        "type": "scatter", "mode": "lines", "name": "exact", "x": ends, "y": ends, "hoverinfo": "skip",
        "line": {"color": "--muted", "dash": "dot", "width": 1.5},
    }  # fmt: skip
    traces = [exact, *(_series(number, group, rows, quantity) for number, group in enumerate(groups))]
    predicted = [row[f"predicted_{unit}"] / quantity.scale for row in rows]
    return figure(
        traces,
        axis(f"True ({quantity.name})", actual, log=True),
        axis(f"Predicted ({quantity.name})", predicted, log=True),
    )


def _series(number: int, group: str, rows: Sequence[Mapping[str, Any]], quantity: Quantity) -> dict[str, Any]:
    members = [row for row in rows if row["group"] == group]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": text(group),
        "x": [row[f"actual_{quantity.key}"] / quantity.scale for row in members],
        "y": [row[f"predicted_{quantity.key}"] / quantity.scale for row in members],
        "text": [_hover(row, quantity) for row in members],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"symbol": SYMBOLS[number % len(SYMBOLS)], "size": 8, "color": SERIES[number % len(SERIES)]},
    }


def _hover(row: Mapping[str, Any], quantity: Quantity) -> str:
    true, predicted = (quantity.write(row[f"{which}_{quantity.key}"]) for which in ("actual", "predicted"))
    return f"{text(row['label'])}<br>predicted {predicted}, true {true}: {row['error']:+.2%}"
