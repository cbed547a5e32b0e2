import pytest

from engine.errors import SpecError
from engine.exercises import EXERCISES, check_answer, solve
from engine.exercises.quantities import parse_quantity
from engine.units import GIB

PER_LAYER = solve(1, {}).answers["per_layer_bytes"]
STANDARD = str(solve(1, {"attention": "standard"}).answers["no_checkpointing_bytes"])
BLOCKS = 40 * 2 * 4 * 4096 * 5120


@pytest.mark.parametrize(
    ("text", "value", "kind"),
    [
        ("6.7 GB", 6.7e9, "bytes"),
        ("6.25GiB", 6.25 * GIB, "bytes"),
        ("6,710,886,400", 6_710_886_400, "plain"),
        ("6.7e9 bytes", 6.7e9, "bytes"),
        ("512 MiB", 512 * 2**20, "bytes"),
        ("2.19 s", 2.19, "seconds"),
        ("2190 ms", 2.19, "seconds"),
        ("14.1x", 14.1, "plain"),
        ("33 %", 0.33, "plain"),
        ("≈ 8", 8, "plain"),
    ],
)
def test_a_quantity_is_read_as_it_is_written(text, value, kind):
    read = parse_quantity(text)
    assert (read.value, read.kind) == (pytest.approx(value), kind)


@pytest.mark.parametrize(
    "text", ["", "GB", "six", "nan", "inf", "1e999", "6.7 furlongs", "6.7 GB GB", "--3", "1" * 500 + "GB"]
)
def test_what_is_no_quantity_is_said_to_be_none(text):
    assert parse_quantity(text) is None
    assert check_answer(1, {}, text).verdict == "unreadable"


@pytest.mark.parametrize(
    "text",
    [str(PER_LAYER), f"{PER_LAYER / 1e9:.2f} GB", f"{PER_LAYER / GIB:.2f} GiB", f"{1.019 * PER_LAYER:.0f}", "6.71 GB"],
    ids=["bytes", "GB", "GiB", "2 % off", "layer inputs alone"],
)
def test_the_right_answer_in_any_unit(text):
    found = check_answer(1, {}, text, "per_layer_bytes")
    assert (found.verdict, found.correct) == ("right", True)


@pytest.mark.parametrize(
    ("number", "key", "text", "says"),
    [
        (1, "per_layer_bytes", f"{PER_LAYER / GIB:.2f} GB", "GiB"),
        (1, "per_layer_bytes", f"{PER_LAYER / 1e9:.2f}", "unit"),
        (1, "per_layer_bytes", f"{BLOCKS / 40} B", "every layer"),
        (1, "per_layer_bytes", f"{2 * BLOCKS} B", "bytes of an element"),
        (1, "no_checkpointing_bytes", "3.157 GB", "one layer"),
        (1, "no_checkpointing_bytes", STANDARD, "standard"),
        (1, "no_checkpointing_bytes", f"{28 * 40 * 4 * 4096 * 5120}", "rule of thumb"),
        (1, "ratio", f"{1 / 17.2136}", "Upside down"),
        (2, "exact_k", "8", "a = b"),
        (2, "discrete_k", "8", "√L"),
        (3, "down_bytes", "275.9 GB", "4 bytes"),
        (3, "serial_seconds", "2.156 s", "One direction only"),
        (3, "duplex_seconds", "4311 ms", "full duplex"),
        (3, "duplex_seconds", "2.2 GB", "not in bytes"),
        (4, "ratio", f"{1 / solve(4, {}).answers['ratio']}", "Upside down"),
        (5, "overhead_fraction", f"{100 * solve(5, {}).answers['overhead_fraction']}", "percent"),
    ],
)  # fmt: skip
def test_a_classic_mistake_is_named(number, key, text, says):
    found = check_answer(number, {}, text, key)
    assert found.verdict in ("mistake", "wrong")
    assert says in found.hint


def test_an_unrecognised_number_is_told_its_direction():
    assert "too large" in check_answer(1, {}, "900 GB", "per_layer_bytes").hint
    assert "too small" in check_answer(1, {}, "1.1 kB", "per_layer_bytes").hint
    assert "above zero" in check_answer(1, {}, "-5 GB", "per_layer_bytes").hint


def test_the_check_follows_the_inputs():
    changed = solve(1, {"layers": "20"}).answers["per_layer_bytes"]
    assert check_answer(1, {"layers": "20"}, str(changed), "per_layer_bytes").correct
    assert not check_answer(1, {}, str(changed), "per_layer_bytes").correct


def test_without_a_key_any_answer_of_the_exercise_counts():
    found = check_answer(1, {}, "17.2")
    assert (found.verdict, found.key) == ("right", "ratio")


@pytest.mark.parametrize("key", ["frontier", "nope"])
def test_a_key_that_holds_no_number_is_refused(key):
    with pytest.raises(SpecError, match="saved_bytes"):
        check_answer(5, {}, "1", key)


@pytest.mark.parametrize("number", EXERCISES)
def test_no_near_miss_is_the_answer_itself(number):
    """A guess that is within tolerance of the right answer would never be reached, or worse, mislead."""
    solution = solve(number, {})
    for key, guesses in solution.guesses.items():
        for guess in guesses:
            assert guess.right or guess.value != solution.answers[key], guess.hint
