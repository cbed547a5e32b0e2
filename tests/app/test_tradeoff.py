from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from app.tradeoff import Point, bends, frontier, knee, more_is_better

SIZES = st.floats(min_value=0, max_value=1e12)
POINTS = st.lists(st.tuples(SIZES, SIZES), max_size=12).map(
    lambda pairs: [Point(str(index), x, y) for index, (x, y) in enumerate(pairs)]
)


def test_frontier_keeps_what_nothing_beats() -> None:
    points = [Point("a", 1, 10), Point("b", 2, 30), Point("worse", 3, 20), Point("c", 4, 40)]
    assert [point.id for point in frontier(points)] == ["a", "b", "c"]


def test_knee_is_nearest_to_the_ideal_corner() -> None:
    assert knee([Point("a", 0, 0), Point("bend", 1, 9), Point("c", 10, 10)]) == Point("bend", 1, 9)


def test_no_points_have_no_knee() -> None:
    assert frontier([]) == []
    assert knee([]) is None


def test_a_front_of_one_point_has_that_knee() -> None:
    assert knee([Point("only", 5, 9), Point("beaten", 6, 8)]) == Point("only", 5, 9)


def test_a_front_of_fewer_than_three_points_does_not_bend() -> None:
    assert not bends(frontier([Point("only", 5, 9)]))
    assert not bends(frontier([Point("a", 1, 1), Point("b", 5, 9), Point("again", 5, 9), Point("beaten", 6, 8)]))
    assert bends([Point("a", 0, 0), Point("bend", 1, 9), Point("c", 10, 10)])


def test_a_front_that_is_flat_on_an_axis_does_not_bend() -> None:
    """Peaks a few bytes apart are no price paid for speed."""
    peaks = [Point("a", 93_153_000, 10), Point("b", 93_153_004, 20), Point("c", 93_153_008, 30)]
    assert len(frontier(peaks)) == 3
    assert not bends(peaks)
    assert not bends([Point("a", 1, 100.0), Point("b", 5, 100.2), Point("c", 9, 100.4)])


def test_equal_points_are_one_frontier_point() -> None:
    assert [point.id for point in frontier([Point("first", 1, 1), Point("second", 1, 1)])] == ["first"]


def test_directions_follow_the_field() -> None:
    assert more_is_better("timing.tokens_per_second")
    assert more_is_better("timing.mfu")
    assert not more_is_better("memory.device_peak_bytes")
    points = [Point("slow", 5, 9), Point("fast", 1, 9)]
    assert [point.id for point in frontier(points, x_up=True, y_up=False)] == ["slow"]


@settings(max_examples=30, deadline=None)
@given(POINTS)
def test_every_point_is_on_the_frontier_or_beaten_by_it(points: list[Point]) -> None:
    front = frontier(points)
    for point in points:
        assert any(each.x <= point.x and each.y >= point.y for each in front)
    for first in front:
        assert not any(other.x <= first.x and other.y >= first.y for other in front if other is not first)
    assert knee(points) in (front or [None])
