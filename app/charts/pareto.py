"""Which runs no other run beats, and which of those is the best trade."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.charts.dimensions import Dimension

Result = Mapping[str, Any]


def frontier(results: Sequence[Result], x: Dimension, y: Dimension) -> list[str]:
    """Ids of the results that no other equals or beats on both axes, by x; empty if an axis has no better end."""
    if x.better is None or y.better is None:
        return []
    costs = sorted(_costs(results, x, y))
    kept: list[str] = []
    best = float("inf")
    for _, cost_y, identifier in costs:
        if cost_y < best:
            best = cost_y
            kept.append(identifier)
    return kept if x.better == "lower" else kept[::-1]


def knee(results: Sequence[Result], x: Dimension, y: Dimension) -> str | None:
    """The frontier point nearest to the ideal corner, each axis scaled to the frontier's own range."""
    members = set(frontier(results, x, y))
    costs = [cost for cost in _costs(results, x, y) if cost[2] in members]
    if not costs:
        return None
    low_x, high_x = min(cost[0] for cost in costs), max(cost[0] for cost in costs)
    low_y, high_y = min(cost[1] for cost in costs), max(cost[1] for cost in costs)

    def distance(cost: tuple[float, float, str]) -> tuple[float, float]:
        away_x = (cost[0] - low_x) / ((high_x - low_x) or 1)
        away_y = (cost[1] - low_y) / ((high_y - low_y) or 1)
        return away_x**2 + away_y**2, cost[0]

    return min(costs, key=distance)[2]


def _costs(results: Sequence[Result], x: Dimension, y: Dimension) -> list[tuple[float, float, str]]:
    """(x, y, id) of the runs that ended well, signed so that less is better on both axes."""
    sign_x, sign_y = (-1 if dimension.better == "higher" else 1 for dimension in (x, y))
    return [
        (sign_x * at_x, sign_y * at_y, result["id"])
        for result in results
        if result["outcome"] == "ok" and (at_x := x.of(result)) is not None and (at_y := y.of(result)) is not None
    ]
