"""The decision ladder and the recommendation for the calculator's configuration, by closed form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.pages.access import prefix
from app.pages.calculator import class_query, read_calculator
from app.pages.form import query_of
from app.pages.labels import differs
from app.pages.render import address, page
from engine.errors import SpecError
from engine.planning import Candidate, Plan, plan
from engine.spec import RunSpec

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class Rung:
    """One candidate: its name on the ladder, what became of it."""

    name: str
    verdict: str
    fits: bool
    peak_bytes: int
    step_seconds: float | None
    tokens_per_second: float | None
    changes: Mapping[str, str]
    verify: Mapping[str, Any]


@router.get("/plan")
def show_plan(request: Request) -> Response:
    """The same query as the calculator's. It takes longer than a keystroke, so the overview loads it by itself."""
    asked = read_calculator(request.query_params)
    base = asked.runs[0] if len(asked.runs) == 1 and not asked.errors else None
    found: Plan | None = None
    problem = "; ".join(f"{key}: {message}" for key, message in asked.errors.items()) or None
    if base and base.gpu:
        try:
            found = _planned(base.model_dump_json())
        except SpecError as error:
            problem = f"{error.field}: {error.message}"
    elif not problem:
        problem = "gpu: name one, so that there is a limit to plan for"
    context = {
        "here": "/",
        "problem": problem,
        "class_query": class_query(base) if problem and base else {},
        "plan": found,
        "ladder": _rungs(found.ladder) if found else [],
        "best": _rungs([found.recommended])[0] if found and found.recommended else None,
        "front": _rungs(found.frontier) if found else [],
        "query": asked.values,
        "plan_url": prefix(request) + address("/plan", asked.values),
    }
    return page(request, "plan.html", context, block="plan", status=422 if problem else 200)


@lru_cache(maxsize=256)
def _planned(spec_json: str) -> Plan:
    spec = RunSpec.model_validate_json(spec_json)
    return plan(spec, spec.gpu or "", gpus=spec.world_size)


def _rungs(candidates: list[Candidate]) -> list[Rung]:
    return [_rung(candidate) for candidate in candidates]


def _rung(candidate: Candidate) -> Rung:
    name, _, verdict = candidate.reason.partition(": ")
    changes = differs(candidate.spec.model_dump())
    return Rung(
        name=name,
        verdict=verdict,
        fits=candidate.fits,
        peak_bytes=candidate.device_peak_bytes,
        step_seconds=candidate.step_seconds,
        tokens_per_second=candidate.tokens_per_second,
        changes={key: value for key, value in changes.items() if key not in ("model", "gpu", "seq")},
        verify=query_of(candidate.spec.model_dump()),
    )
