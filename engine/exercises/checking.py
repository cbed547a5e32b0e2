"""Does the reader's number answer the exercise, and if not, which mistake does it look like?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from engine.exercises.exercise import Guess, Solution
from engine.exercises.quantities import Quantity, parse_quantity
from engine.units import GIB, format_bytes, format_seconds

TOLERANCE = 0.02

Verdict = Literal["right", "mistake", "wrong", "unreadable"]


@dataclass(frozen=True, slots=True)
class Check:
    """`key` is the answer that was compared, `hint` a sentence for the reader."""

    verdict: Verdict
    key: str
    hint: str

    @property
    def correct(self) -> bool:
        return self.verdict == "right"


def near(value: float, target: float) -> bool:
    """Within 2 % of the target."""
    return abs(value - target) <= TOLERANCE * abs(target)


def check(solution: Solution, key: str, text: str) -> Check:
    """Compare what the reader wrote with one answer of the solution."""
    expected = solution.answers[key]
    quantity = parse_quantity(text)
    if quantity is None:
        return Check("unreadable", key, f"{text[:40]!r} is not a number with a unit; write it like {_example(key)}.")
    if quantity.kind != "plain" and quantity.kind != _kind(key):
        return Check("wrong", key, f"The answer is not in {quantity.kind}: write it like {_example(key)}.")
    if near(quantity.value, expected):
        return Check("right", key, f"Right: {describe(key, expected)}.")
    for guess in (*solution.guesses.get(key, ()), *_generic(key, expected, quantity)):
        if guess.value and near(quantity.value, guess.value):
            return Check("right" if guess.right else "mistake", key, guess.hint)
    return Check("wrong", key, _direction(quantity.value, expected))


def _kind(key: str) -> str:
    return {"bytes": "bytes", "seconds": "seconds"}.get(key.rpartition("_")[2], "plain")


def _example(key: str) -> str:
    return {"bytes": "6.7 GB, 6.2 GiB or 6700000000", "seconds": "2.2 s or 2200 ms"}.get(_kind(key), "14.1")


def describe(key: str, value: float) -> str:
    """An answer as a person reads it; bytes in both systems."""
    if _kind(key) == "bytes":
        return f"{format_bytes(value)} = {value / 1e9:,.2f} GB"
    return format_seconds(value) if _kind(key) == "seconds" else f"{value:,.4g}"


def _generic(key: str, expected: float, quantity: Quantity) -> Iterator[Guess]:
    """Mistakes that any quantity allows."""
    kind = _kind(key)
    if kind == "bytes":
        yield Guess(
            expected * 1e9 / GIB, "You have GiB (2^30) but wrote GB (10^9): the digits are right, the unit is not."
        )
        yield Guess(
            expected * GIB / 1e9, "You have GB (10^9) but wrote GiB (2^30): the digits are right, the unit is not."
        )
        if quantity.unit == "":
            yield Guess(expected / 1e9, "The digits are right in GB: write the unit, plain numbers are bytes.")
            yield Guess(expected / GIB, "The digits are right in GiB: write the unit, plain numbers are bytes.")
        yield Guess(expected * 8, "Those are bits: divide by 8.")
        yield Guess(expected / 8, "Divided by 8 once too often: the answer is in bytes.")
    if kind == "seconds":
        yield Guess(expected * 8, "Eight times too long: is the bandwidth in bytes, not bits, a second?")
        yield Guess(expected * 1000, "A thousand times too long: seconds or milliseconds?")
        yield Guess(expected / 1000, "A thousand times too short: seconds or milliseconds?")
    if kind in ("bytes", "seconds"):
        yield Guess(expected * 2, "Twice the answer: fp32 (4 bytes) counted for bf16 (2)?")
        yield Guess(expected / 2, "Half the answer: bf16 (2 bytes) counted for fp32 (4)?")


def _direction(value: float, expected: float) -> str:
    if value <= 0:
        return "Not yet: the answer is above zero."
    factor = max(value / expected, expected / value)
    size = "a little" if factor < 1.25 else f"about {factor:,.3g} times"
    return f"Not yet: your number is {size} too {'large' if value > expected else 'small'}."
