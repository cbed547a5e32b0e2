"""The overview: what fits (closed form), and the latest curve that was measured here."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from app.db import runs
from app.jobs import queue
from app.pages.access import database, prefix
from app.pages.calculator import DEFAULTS, MORE_FIELDS, Answer, answer, class_query, read_calculator
from app.pages.form import EXAMPLE, Draft, form_fields, query_of
from app.pages.jobs import job_view
from app.pages.labels import usable_models
from app.pages.render import address, page
from app.pages.views import Curve, curve
from engine.catalog import gpus

router = APIRouter(include_in_schema=False)

HINTS = {
    "model": "A preset, gpt:L,d,a[,V] or llama:L,d,a,kv,f[,V].",
    "gpu": "What the peak is held against; blank for none.",
    "micro_batch": "Sequences a step.",
    "seq": "Tokens in each.",
}
LATEST_JOBS = 20  # looked through for one with a curve


@router.get("/")
def home(request: Request) -> Response:
    """The calculator's fields are the query."""
    asked, worked = _calculate(request)
    base = asked.runs[0] if asked.runs else None
    policies = [row.name for row in worked.rows if row.result] if worked else []
    predicted = worked is not None and worked.missing is None
    verify = query_of(base.model_dump(), {"checkpointing": policies}) if base else {}
    usual = {key: DEFAULTS.get(key, [spec_field.shown_default]) for key, spec_field in form_fields().items()}
    query = {key: values for key, values in asked.values.items() if values != usual[key]}
    context: dict[str, Any] = {
        "here": "/",
        "fields": form_fields(),
        "more_fields": MORE_FIELDS,
        "shown_fields": (*DEFAULTS, *MORE_FIELDS),
        "more_open": any(key in query for key in MORE_FIELDS),
        "hints": HINTS,
        "draft": asked,
        "answer": worked,
        "warnings": _warnings(worked),
        "verify_all": verify,
        "class_query": class_query(base) if base else {},
        "models": usable_models(),
        "gpus": list(gpus()),
        "curve": _latest_curve(request),
        "example": EXAMPLE,
        "idempotency_key": uuid4().hex,
        "plan_url": prefix(request) + address("/plan", query) if predicted and base and base.gpu else None,
        "machine_form": prefix(request) + address("/calculator.json", query),
    }
    made = page(request, "home.html", context, block="answer", status=422 if asked.errors else 200)
    made.headers["HX-Push-Url"] = prefix(request) + address("/", query)
    return made


@router.get("/calculator.json")
def calculator_json(request: Request) -> Response:
    """The calculator's table for a program: one closed-form result a policy."""
    asked, worked = _calculate(request)
    if worked is None:
        return JSONResponse({"errors": asked.errors}, status_code=422)
    rows = [
        {
            "checkpointing": row.name,
            "fits": row.fits,
            "headroom_bytes": row.headroom_bytes,
            "missing": row.missing,
            "result": row.result.model_dump(mode="json", exclude={"ledger"}) if row.result else None,
        }
        for row in worked.rows
    ]
    return JSONResponse({"gpu": asdict(worked.card) if worked.card else None, "rows": rows})


def _calculate(request: Request) -> tuple[Draft, Answer | None]:
    asked = read_calculator(request.query_params)
    return asked, answer(asked)


def _warnings(worked: Answer | None) -> list[str]:
    """What the prediction says of itself, for the row that a reader would choose."""
    chosen = worked.chosen if worked else None
    return chosen.result.warnings if chosen and chosen.result else []


def _latest_curve(request: Request) -> dict[str, Any] | None:
    """The newest job with at least two runs that ended well."""
    with database(request).read() as session:
        for found in queue.page(session, limit=LATEST_JOBS)[0]:
            job = job_view(queue.view(found))
            results = runs.of_job(session, job.id) if job.runs_done >= 2 and job.method == "measured" else []
            if sum(result["outcome"] == "ok" for result in results) >= 2:
                shown: Curve = curve(results, vary=list(job.vary), prefix=prefix(request))
                words = {"figure": shown.figure, "label": shown.label, "caption": shown.caption}
                return {"job_id": job.id, "title": job.title, "method": job.method, **words}
    return None
