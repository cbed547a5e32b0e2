"""The trace: categories, peak and timeline from a hand-made sequence of events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.trace import Recorder, Trace, timeline

BASE = {"parameters": 100, "optimizer_states": 200}


def small_step() -> Trace:
    """forward keeps a (10) and drops b (50); backward recomputes c (7), makes temporary d (3) and gradient g (100)."""
    recorder = Recorder()
    recorder.phase("forward", 1, True)
    recorder.block("block 0", 2, True)
    recorder.allocate("a", 10, 3)
    recorder.allocate("b", 50, 4)
    recorder.free("b", 5)
    recorder.block("block 0", 6, False)
    recorder.phase("forward", 7, False)
    recorder.phase("backward", 8, True)
    recorder.block("block 0", 9, True)
    recorder.allocate("c", 7, 10)
    recorder.block("block 0", 11, False)
    recorder.allocate("d", 3, 12)
    recorder.allocate("g", 100, 13)
    recorder.gradient("g")
    recorder.free("d", 14)
    recorder.free("c", 15)
    recorder.free("a", 16)
    recorder.phase("backward", 17, False)
    recorder.free("g", 18)
    return recorder.finish(BASE, "events")


def test_saved_bytes_are_what_lives_when_forward_ends() -> None:
    assert small_step().saved_bytes() == 10


def test_peak_is_in_backward_and_its_categories_sum_to_it() -> None:
    trace = small_step()
    time, peak = trace.peak()
    assert (time, peak) == (13, 300 + 10 + 7 + 3 + 100)
    assert trace.phase_at(time) == "backward"
    at = trace.at(time)
    assert (at.activations, at.temporaries, at.gradients) == (17, 3, 100)
    assert sum(at.model_dump().values()) == peak


def test_a_free_of_something_older_than_the_step_is_ignored() -> None:
    recorder = Recorder()
    recorder.phase("forward", 0, True)
    recorder.free("older", 1)
    assert recorder.finish(BASE, "events").peak() == (0, 300)


def test_a_key_may_return_after_its_storage_died() -> None:
    recorder = Recorder()
    recorder.phase("forward", 0, True)
    for time in (1, 3):
        recorder.allocate("address", 8, time)
        recorder.free("address", time + 1)
    assert [live for _, live in recorder.finish({}, "events").curve()] == [8, 0, 8, 0]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 1000), st.booleans()), min_size=1, max_size=400), st.integers(10, 60))
def test_down_sampling_keeps_the_peak_and_every_column_sums_to_the_curve(
    steps: list[tuple[int, bool]], points: int
) -> None:
    recorder = Recorder()
    recorder.phase("forward", 0, True)
    for number, (size, free_one) in enumerate(steps):
        recorder.allocate(number, size, 2 * number + 1)
        if free_one:
            recorder.free(next(iter(recorder.live)), 2 * number + 2)
    recorder.phase("forward", 2 * len(steps) + 3, False)
    trace = recorder.finish(BASE, "events")
    picture = timeline(trace, points)
    totals = [
        sum(column)
        for column in zip(
            picture.parameters,
            picture.gradients,
            picture.optimizer_states,
            picture.activations,
            picture.temporaries,
            strict=True,
        )
    ]
    assert max(totals) == totals[picture.peak_index] == trace.peak()[1]
    live = dict(trace.curve())
    assert totals == [live[time] for time in picture.x]
    assert len(picture.x) <= points + 4


def test_timeline_names_what_was_alive_at_the_peak() -> None:
    rows = timeline(small_step()).alive_at_peak
    assert rows[0] == {"bytes": 100, "category": "gradients", "count": 1, "where": "outside the blocks"}
    assert {"bytes": 10, "category": "activations", "count": 1, "where": "block 0"} in rows


@pytest.mark.parametrize("count", [1, 2])
def test_timeline_of_almost_nothing(count: int) -> None:
    recorder = Recorder()
    recorder.phase("forward", 0, True)
    for number in range(count):
        recorder.allocate(number, 5, number + 1)
    recorder.phase("forward", 9, False)
    assert len(timeline(recorder.finish({}, "events")).x) == count
