"""The course's five exercises, worked out by the same predictor as everything else. Torch-free.

`solve(n, query)` answers with any inputs changed; `check_answer` compares a reader's number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import SpecError
from engine.exercises import activations, interval, offload, selective, sequence
from engine.exercises.checking import Check, check
from engine.exercises.exercise import Exercise, Solution

EXERCISES: dict[int, Exercise] = {
    module.EXERCISE.number: module.EXERCISE for module in (activations, interval, offload, sequence, selective)
}

__all__ = ["EXERCISES", "Check", "Exercise", "Solution", "check_answer", "solve"]


def exercise(number: int) -> Exercise:
    """Raises SpecError if there is no such exercise."""
    if number not in EXERCISES:
        raise SpecError("exercise", f"no exercise {number}; one of {', '.join(map(str, EXERCISES))}")
    return EXERCISES[number]


def solve(number: int, query: Mapping[str, Any]) -> Solution:
    """The exercise with the inputs in `query`, the others by default. Raises SpecError naming the input at fault."""
    chosen = exercise(number)
    return chosen.solve(chosen.parse(query))


def check_answer(number: int, query: Mapping[str, Any], answer: str, key: str | None = None) -> Check:
    """Compare a reader's answer with the one asked for by `key`, or, without a key, with every answer of the exercise.

    Raises SpecError naming the input at fault, or `key`.
    """
    solution = solve(number, query)
    asked = [name for name, value in solution.answers.items() if isinstance(value, int | float)]
    if key is not None and key not in asked:
        raise SpecError("key", f"no answer {key[:40]!r}; one of {', '.join(asked)}")
    checks = [check(solution, each, answer) for each in (asked if key is None else [key])]
    order = ("right", "mistake", "wrong", "unreadable")
    return min(checks, key=lambda each: order.index(each.verdict))
