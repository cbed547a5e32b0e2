"""The exercise pages: a form whose query string is the whole state, the solution in the reader's numbers, a check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response

from app.api import predictions
from app.errors import AppError
from app.pages.figures import figure, show, show_both
from app.pages.form import query_of
from app.pages.mathml import mathml
from app.pages.render import address, page, templates
from app.services import Needs, Services
from engine.errors import SpecError
from engine.exercises import EXERCISES, Check, Exercise, Solution, check_answer, solve
from engine.exercises.exercise import Lines

router = APIRouter(include_in_schema=False)

CONTROLS = ("answer", "key", "solution", "simulate")
"""Query keys that are not inputs: what the reader answered, to which question, whether the solution waits, and whether
to simulate points for the chart."""

templates().env.filters.update(mathml=mathml, show=show, show_both=show_both)


@router.get("/exercises")
def index(request: Request) -> Response:
    """The five exercises."""
    context = {"here": "/exercises", "exercises": EXERCISES, "machine_form": "/api/v1/exercises"}
    return page(request, "exercises.html", context)


@router.get("/exercises/{number}")
def exercise_page(request: Request, number: str, needs: Needs) -> Response:
    """One exercise with the inputs in the query string."""
    exercise = next((each for each in EXERCISES.values() if str(each.number) == number), None)
    if exercise is None:
        names = ", ".join(f"{each.number} ({each.title})" for each in EXERCISES.values())
        raise HTTPException(404, f"There is no such exercise; they are {names}.")
    query = dict(request.query_params)
    controls = {name: query.pop(name, "").strip() for name in CONTROLS}
    typed = _joined(exercise, request, query)
    solution, error, verdict = _solved(exercise, typed, controls)
    if solution and controls["simulate"] and exercise.simulate:
        solution, error = _with_points(exercise, solution, needs)
    tried = verdict is not None and verdict.verdict != "unreadable"
    context = {
        "here": "/exercises",
        "machine_form": address(f"/api/v1/exercises/{exercise.number}", typed),
        "exercises": EXERCISES,
        "exercise": exercise,
        "typed": {each.name: typed.get(each.name, each.default) for each in exercise.inputs},
        "controls": controls,
        "error": error,
        "solution": solution,
        "verdict": verdict,
        "revealed": controls["solution"] != "hidden" or tried,
        "figures": [figure(chart) for chart in solution.charts] if solution else [],
        "links": _links(solution) if solution else {},
    }
    return page(request, "exercise.html", context, block="work", status=422 if error else 200)


def _joined(exercise: Exercise, request: Request, query: Mapping[str, str]) -> dict[str, str]:
    """Ticked boxes arrive as one key several times and are written `one+two`. An empty field is its default."""
    several = {each.name for each in exercise.inputs if each.several}
    joined = {name: value for name, value in query.items() if value.strip() and name not in several}
    for name in several & set(query):
        joined[name] = "+".join(value for value in request.query_params.getlist(name) if value) or "none"
    return joined


def _solved(
    exercise: Exercise, typed: Mapping[str, str], controls: Mapping[str, str]
) -> tuple[Solution | None, SpecError | None, Check | None]:
    """The solution and the check of an answer, or what is wrong with the inputs."""
    try:
        solution = solve(exercise.number, typed)
        checked = None
        if controls["answer"]:
            checked = check_answer(exercise.number, typed, controls["answer"][:100], controls["key"] or None)
    except SpecError as error:
        return None, error, None
    return solution, None, checked


def _with_points(exercise: Exercise, solution: Solution, needs: Services) -> tuple[Solution, SpecError | None]:
    """The solution with simulated points on its first chart, or as it was with the reason why there are none."""
    assert exercise.simulate is not None
    chart = solution.charts[0]
    try:
        points = exercise.simulate(
            solution.inputs, lambda spec: predictions.simulated(needs.database, needs.simulator, spec)
        )
    except SpecError as error:
        return solution, error
    except AppError as error:
        return solution, SpecError("simulate", str(error))
    assert isinstance(chart, Lines)
    drawn = replace(chart, series=(*chart.series, points))
    return replace(solution, charts=[drawn, *solution.charts[1:]]), None


def _links(solution: Solution) -> dict[str, Any]:
    """Where the same configuration opens: the calculator, a simulation, a benchmark of the small version."""
    return {
        "Predict this": address("/", query_of(solution.spec)),
        "Simulate this": address("/jobs/new", query_of(solution.spec, method="simulated")),
        "Benchmark a small version": address("/jobs/new", query_of(solution.small_spec, solution.vary)),
    }
