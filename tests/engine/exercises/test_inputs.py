"""Inputs: every bound has a message, and no accepted value gives anything but finite numbers."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import SpecError
from engine.exercises import EXERCISES, solve

ALL = [(number, each) for number, exercise in EXERCISES.items() for each in exercise.inputs]
IDS = [f"{number}-{each.name}" for number, each in ALL]
NUMBERS = [(number, each) for number, each in ALL if not each.choices]
NUMBER_IDS = [f"{number}-{each.name}" for number, each in NUMBERS]


def finite(value) -> bool:
    """True if no number inside is NaN or infinite."""
    json.dumps(value, allow_nan=False)
    return True


def test_no_choice_at_all_is_a_choice():
    assert solve(5, {"recompute": ""}).answers["saved_bytes"] == 0


@pytest.mark.parametrize(("number", "each"), ALL, ids=IDS)
@pytest.mark.parametrize(
    "text", ["nan", "inf", "-inf", "?", "+", "-1", "1e999", "x", "0x10", "1_0", "１", "1;2", "\x00", "9" * 40]
)
def test_nonsense_is_refused_by_name_and_with_what_is_accepted(number, each, text):
    with pytest.raises(SpecError) as refused:
        solve(number, {each.name: text})
    assert refused.value.field == each.name
    assert each.accepts in refused.value.message


@pytest.mark.parametrize(("number", "each"), NUMBERS, ids=NUMBER_IDS)
def test_each_bound_is_accepted_or_refused_in_words(number, each):
    for value in (each.minimum, each.maximum):
        typed = int(value) if isinstance(each.default, int) else value
        try:
            solution = solve(number, {each.name: typed})
        except SpecError:  # a bound that another input does not allow: refused in words, which is all that is asked
            continue
        assert finite(solution.answers)
        assert all(step.value is None or math.isfinite(step.value) for step in solution.steps)


@pytest.mark.parametrize(("number", "each"), NUMBERS, ids=NUMBER_IDS)
def test_beyond_a_bound_is_refused(number, each):
    for value in (each.minimum - 1, each.maximum + 1):
        with pytest.raises(SpecError, match=each.name):
            solve(number, {each.name: value})


@pytest.mark.parametrize("number", EXERCISES)
def test_an_unknown_input_is_refused_with_the_known_ones(number):
    with pytest.raises(SpecError, match="no such input") as refused:
        solve(number, {"layerz": "4"})
    assert EXERCISES[number].inputs[0].name in refused.value.message


@pytest.mark.parametrize("number", [1, 2, 5])
def test_heads_that_do_not_divide_are_refused(number):
    with pytest.raises(SpecError, match="heads"):
        solve(number, {"heads": "7"})


def test_an_unknown_exercise_is_refused():
    with pytest.raises(SpecError, match="no exercise 6"):
        solve(6, {})


@given(layers=st.integers(1, 60), seq=st.integers(1, 5000), batch=st.integers(1, 64))
@settings(max_examples=20, deadline=None)
def test_activations_are_linear_in_layers_and_batch(layers, seq, batch):
    shape = {"layers": layers, "seq": seq, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 172, "vocab": 100}
    one, many = solve(1, {**shape, "batch": 1}), solve(1, {**shape, "batch": batch})
    block = {solution.inputs["batch"]: solution.steps[2].value for solution in (one, many)}
    assert block[batch] == batch * block[1]
    assert one.steps[2].value == layers * one.steps[1].value


@given(seq=st.integers(2, 4000))
@settings(max_examples=20, deadline=None)
def test_scores_are_quadratic_in_the_sequence(seq):
    """Doubling S quadruples what standard attention keeps beyond flash, its log-sum-exp (4·B·H·S a layer) aside."""

    def square(length: int) -> float:
        kinds = ("standard", "flash")
        standard, flash = (solve(1, {"layers": 1, "seq": length, "attention": kind}).steps[1].value for kind in kinds)
        return standard - flash + 4 * 4 * 40 * length

    assert square(2 * seq) == 4 * square(seq)


@given(link=st.floats(1, 1000))
@settings(max_examples=20, deadline=None)
def test_transfer_time_falls_with_bandwidth(link):
    one, twice = solve(3, {"link_gbs": link}), solve(3, {"link_gbs": 2 * link})
    assert one.answers["serial_seconds"] == pytest.approx(2 * twice.answers["serial_seconds"])
    assert one.answers["serial_seconds"] == pytest.approx(2 * one.answers["duplex_seconds"])
    assert one.answers["down_bytes"] == twice.answers["down_bytes"]


def test_fp32_traffic_is_twice_bf16():
    bf16, fp32 = (solve(3, {"traffic": kind}).answers for kind in ("bf16-mixed", "fp32"))
    assert {key: fp32[key] / bf16[key] for key in bf16} == dict.fromkeys(bf16, 2.0)


@given(layers=st.integers(1, 64), ratio=st.floats(0.5, 60))
@settings(max_examples=20, deadline=None)
def test_the_best_interval_is_no_worse_than_any_other(layers, ratio):
    solution = solve(2, {"layers": layers, "ratio": ratio})
    formula = next(series for series in solution.charts[0].series if series.name.startswith("(L/k)"))
    assert solution.answers["minimum_bytes"] == min(peak for _, peak in formula.points)
    assert solution.answers["exact_k"] == pytest.approx(math.sqrt(layers / ratio), rel=1e-3)


def test_the_longest_sequence_that_fits_is_the_last_one_that_does():
    from engine.closed_form import predict
    from engine.exercises.sequence import longest_sequence, spec_of

    inputs = EXERCISES[4].parse({"model": "llama-3.1-8b", "offload_optimizer": "cpu"})
    longest = longest_sequence(inputs, "b", "a100-80gb-sxm")
    fits = [predict(spec_of(inputs, "b", seq=seq, gpu="a100-80gb-sxm")).fits for seq in (longest, longest + 1)]
    assert [answer.fits for answer in fits] == [True, False]
