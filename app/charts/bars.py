"""Stacked memory bars as numbers: the page draws them as SVG on the server, so they need no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.charts.figure import CATEGORIES
from engine.units import format_bytes


@dataclass(frozen=True, slots=True)
class Segment:
    """One category's piece of a bar, in percent of the bar's full width."""

    category: str
    x: float
    width: float
    title: str


def segments(at_peak: Mapping[str, Any] | None, full_bytes: float) -> list[Segment]:
    """The pieces of one bar, left to right; a bar longer than `full_bytes` is cut at its end."""
    pieces: list[Segment] = []
    at = 0.0
    for key, label in CATEGORIES.items():
        count = (at_peak or {}).get(key) or 0
        width = min(100 * count / full_bytes, 100 - at) if full_bytes else 0
        if width > 0:
            pieces.append(Segment(key, round(at, 3), round(width, 3), f"{label}: {format_bytes(count)}"))
        at += width
    return pieces


def full_width(peaks: Sequence[float], limit_bytes: float | None) -> float:
    """The bytes that fill a whole bar: the limit with some room, or the largest peak; at most four times the limit,
    beyond which the bars of what does fit could not be read."""
    top = max(peaks, default=0)
    if limit_bytes is None:
        return top or 1
    return max(limit_bytes * 1.15, min(top * 1.02, limit_bytes * 4))
