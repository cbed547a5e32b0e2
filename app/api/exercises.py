"""/exercises: the course's exercises, worked out for any inputs, and a check of a reader's answer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException
from pydantic import BaseModel, Field

from app.api.queries import open_query
from app.api.schemas import Body, Line
from app.api.strict_json import StrictRoute
from engine.exercises import EXERCISES, check_answer, solve
from engine.exercises.exercise import Solution

router = APIRouter(prefix="/exercises", tags=["exercises"], route_class=StrictRoute)

Inputs = Annotated[dict[str, str], Depends(open_query)]
ShortLine = Annotated[Line, Field(max_length=100)]


class StepView(BaseModel):
    text: str
    formula: str
    value: float | None
    unit: str | None


class SolutionView(BaseModel):
    inputs: dict[str, int | float | str]
    answers: dict[str, Any] = Field(description="The last word of a key is its unit: bytes, seconds, fraction.")
    steps: list[StepView]
    notes: list[str]
    spec: dict[str, Any] = Field(description="The same configuration for POST /predictions.")
    small_spec: dict[str, Any]
    vary: dict[str, list[Any]] = Field(description="With `small_spec`, a job that measures a small version.")


class Answer(Body):
    """An answer as written (`6.2 GiB`), or a plain number of bytes or seconds."""

    answer: ShortLine | Annotated[float, Field(strict=True)]
    key: ShortLine | None = Field(default=None, description="Which answer it is; by default any of the exercise's.")
    inputs: dict[ShortLine, str | int | float] = Field(
        default={}, max_length=50, description="The exercise's inputs; the query may hold them too."
    )


class Verdict(BaseModel):
    verdict: Literal["right", "mistake", "wrong", "unreadable"]
    correct: bool
    key: str
    hint: str


def _known(number: int) -> int:
    if number not in EXERCISES:
        raise HTTPException(404, f"no exercise {number}; they are {', '.join(map(str, EXERCISES))}")
    return number


def view(solution: Solution) -> SolutionView:
    """What of a solution is data; charts and hints stay with the pages."""
    return SolutionView(
        inputs=dict(solution.inputs),
        answers=solution.answers,
        steps=[StepView(text=s.text, formula=s.formula, value=s.value, unit=s.unit) for s in solution.steps],
        notes=solution.notes,
        spec=solution.spec,
        small_spec=solution.small_spec,
        vary=solution.vary,
    )


@router.get("")
def list_exercises() -> list[dict[str, Any]]:
    """Every exercise: its question, its inputs with their bounds, and what is asked."""
    return [
        {
            "number": exercise.number,
            "title": exercise.title,
            "question": exercise.question,
            "inputs": [asdict(each) | {"accepts": each.accepts} for each in exercise.inputs],
            "asked": exercise.asked,
        }
        for exercise in EXERCISES.values()
    ]


@router.get("/{number}")
def solve_exercise(number: int, inputs: Inputs) -> SolutionView:
    """Inputs, answers, steps and notes. The query holds the inputs that differ from the exercise's own."""
    return view(solve(_known(number), inputs))


@router.post("/{number}/check")
def check_exercise(number: int, body: Answer, inputs: Inputs) -> Verdict:
    """Whether an answer is right (within 2 %), and if not, which mistake it looks like."""
    written = body.answer if isinstance(body.answer, str) else f"{body.answer:.17g}"
    found = check_answer(_known(number), {**inputs, **body.inputs}, written, body.key)
    return Verdict(verdict=found.verdict, correct=found.correct, key=found.key, hint=found.hint)
