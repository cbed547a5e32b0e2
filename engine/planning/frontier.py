"""Pareto fronts and their knees."""

from __future__ import annotations

from collections.abc import Sequence


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (cost, value) that no other point beats in both, in order of cost. Of equal points the
    first stays."""
    ranked = sorted(range(len(points)), key=lambda index: (points[index][0], -points[index][1]))
    front: list[int] = []
    best = float("-inf")
    for index in ranked:
        if points[index][1] > best:
            front.append(index)
            best = points[index][1]
    return front


def knee(points: Sequence[tuple[float, float]]) -> int | None:
    """Index of the front's point that is farthest above the line from its first to its last, both axes scaled to 1
    (the "kneedle" of Satopää et al. 2011). None without points; the best value where the front is a line."""
    front = pareto(points)
    if len(front) < 3:
        return front[-1] if front else None
    (x0, y0), (x1, y1) = points[front[0]], points[front[-1]]

    def height(index: int) -> float:
        x, y = points[index]
        return (y - y0) / (y1 - y0) - (x - x0) / (x1 - x0)

    best = max(front, key=height)
    return best if height(best) > 1e-9 else front[-1]
