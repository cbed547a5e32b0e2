"""Which points no other beats, and which of those is the best trade. Pure functions over (id, x, y)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LEAST_POINTS = 3
"""A front of fewer points has two ends and nothing between them."""
LEAST_SPAN = 0.01
"""A front that spans less of its values than this on an axis is flat: what it would trade is within the noise."""

MORE_IS_BETTER = ("tokens_per_second", "mfu", "hfu", "headroom_bytes")


class Point(NamedTuple):
    id: str
    x: float
    y: float


def more_is_better(path: str) -> bool:
    """Throughputs and utilisations are better high, everything else (bytes, seconds, sizes) low."""
    return path.endswith(MORE_IS_BETTER)


def frontier(points: Sequence[Point], *, x_up: bool = False, y_up: bool = True) -> list[Point]:
    """The Pareto frontier by ascending x: points that no other equals or beats on both axes. Ties keep the first.

    `x_up` and `y_up` tell whether more is better on that axis.
    """
    costs = sorted((_cost(point, x_up, y_up), index) for index, point in enumerate(points))
    kept: list[Point] = []
    best = float("inf")
    for (_, cost), index in costs:
        if cost < best:
            best = cost
            kept.append(points[index])
    return sorted(kept, key=lambda point: point.x)


def knee(points: Sequence[Point], *, x_up: bool = False, y_up: bool = True) -> Point | None:
    """The frontier point nearest to the ideal corner, each axis scaled to the frontier's own range.

    With one point, that point; of two equally near, the one that costs less on x.
    """
    front = frontier(points, x_up=x_up, y_up=y_up)
    if not front:
        return None
    costs = {point: _cost(point, x_up, y_up) for point in front}
    low = [min(cost[axis] for cost in costs.values()) for axis in (0, 1)]
    range_ = [max(cost[axis] for cost in costs.values()) - low[axis] or 1.0 for axis in (0, 1)]

    def distance(point: Point) -> tuple[float, float]:
        away = [(costs[point][axis] - low[axis]) / range_[axis] for axis in (0, 1)]
        return away[0] ** 2 + away[1] ** 2, costs[point][0]

    return min(front, key=distance)


def bends(front: Sequence[Point]) -> bool:
    """Whether a front's knee is worth pointing at: it has LEAST_POINTS points, and is flat on neither axis."""
    return len(front) >= LEAST_POINTS and not any(
        _flat(values) for values in ([p.x for p in front], [p.y for p in front])
    )


def _flat(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= LEAST_SPAN * max(map(abs, values))


def _cost(point: Point, x_up: bool, y_up: bool) -> tuple[float, float]:
    """Signed so that less is better on both axes."""
    return (-point.x if x_up else point.x, -point.y if y_up else point.y)
