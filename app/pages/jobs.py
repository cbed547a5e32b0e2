"""Submitting a job, watching it, stopping it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import uuid4

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse, Response
from starlette.datastructures import FormData

from app.db import runs
from app.db.models import FINAL, LIVE, STATUSES
from app.fields import spell
from app.jobs import log, queue
from app.pages.access import database, prefix, settings
from app.pages.calculator import closed_form
from app.pages.commands import as_cli, as_curl, as_python
from app.pages.form import Draft, form_fields, parse, query_of
from app.pages.labels import facts, full_spec, job_summary, run_label, usable_models
from app.pages.render import address, page
from app.pages.views import curve, run_durations, run_row, time_left
from engine.catalog import gpus
from engine.spec import RunSpec

router = APIRouter(include_in_schema=False)

MAIN_FIELDS = ("model", "micro_batch", "seq", "checkpointing", "attention", "precision")
HINTS = {
    "model": "A preset, gpt:L,d,a[,V] or llama:L,d,a,kv,f[,V]; several parted by spaces.",
    "micro_batch": "Sequences in one forward pass; several parted by commas.",
    "seq": "Tokens in a sequence; several parted by commas.",
    "attention": "flash: the device's fused kernel. standard: scores materialised. tiled, triton: Remat's own.",
    "precision": "Bytes a parameter with AdamW: bf16-mixed 16, bf16 8, bf16-12 12, fp32 16, bf16-autocast 16.",
}
PREVIEWED = 12
LOG_LINES = 60


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as pages show it."""

    id: str
    title: str
    summary: str
    status: str
    method: str
    spec: Mapping[str, Any]
    vary: Mapping[str, list[Any]]
    runs_total: int
    runs_done: int
    attempt: int
    error: str | None
    phase: str | None
    created_at: str
    started_at: str | None
    elapsed_seconds: float | None

    @property
    def live(self) -> bool:
        return self.status not in FINAL

    @property
    def can_cancel(self) -> bool:
        return self.status in ("queued", "running")

    @property
    def can_retry(self) -> bool:
        return self.status in ("failed", "cancelled", "timed_out")


def job_view(job: Mapping[str, Any]) -> JobView:
    """The view of a job as the API shows it."""
    summary = job_summary(job["spec"], job["vary"])
    return JobView(
        id=job["id"],
        title=job["name"] or summary,
        summary=summary,
        status=job["status"],
        method=job["method"],
        spec=job["spec"],
        vary=job["vary"],
        runs_total=job["runs_total"],
        runs_done=job["runs_done"],
        attempt=job["attempt"],
        error=job["error"],
        phase=_phase(job["progress"]) if job["status"] in LIVE else None,
        created_at=job["created_at"],
        started_at=job["started_at"],
        elapsed_seconds=_elapsed(job["started_at"], job["finished_at"]),
    )


def _phase(progress: Mapping[str, Any] | None) -> str | None:
    """`timing 3 of 5`"""
    if not progress or not progress.get("phase"):
        return None
    step, steps = progress.get("step"), progress.get("steps")
    return f"{progress['phase']} {step} of {steps}" if step is not None and steps else str(progress["phase"])


def _elapsed(started_at: str | None, finished_at: str | None) -> float | None:
    if started_at is None:
        return None
    end = datetime.fromisoformat(finished_at) if finished_at else datetime.now(UTC)
    return max((end - datetime.fromisoformat(started_at)).total_seconds(), 0.0)


@router.get("/jobs")
def list_jobs(request: Request, status: str = "", before: Annotated[str, Query(max_length=64)] = "") -> Response:
    """All jobs, newest first, or those of one status."""
    if status and status not in STATUSES:
        raise HTTPException(422, f"status must be one of {', '.join(STATUSES)}")
    with database(request).read() as session:
        found, following = queue.page(session, [status] if status else [], before_id=before or None)
        jobs = [job_view(queue.view(job)) for job in found]
    query = {"status": status, "before": before}
    context = {
        "here": "/jobs",
        "jobs": jobs,
        "status": status,
        "statuses": STATUSES,
        "any_live": any(job.live for job in jobs),
        "here_url": address("/jobs", query),
        "next_url": address("/jobs", query | {"before": following}) if following else None,
        "machine_form": address("/jobs.json", {"status": status}),
    }
    return page(request, "jobs.html", context, block="rows")


@router.get("/jobs/new")
def new_job(request: Request) -> Response:
    """The form. Its whole state may stand in the query; empty, it is the example."""
    return _form_page(request, parse(request.query_params, example=True), uuid4().hex)


@router.post("/jobs/new")
async def create_job(request: Request) -> Response:
    """Submit the form: to the new job's page, or back to the form with a message beside each field at fault."""
    form = await request.form(max_files=0, max_fields=500)
    return await run_in_threadpool(_create, request, form)


def _create(request: Request, form: FormData) -> Response:
    draft = parse(form)
    nonce = str(form.get("idempotency_key", ""))
    nonce = nonce if re.fullmatch(r"[0-9a-f]{32}", nonce) else uuid4().hex
    if draft.errors:
        return _form_page(request, draft, nonce, status=422)
    submission = queue.prepare(
        draft.payload["spec"],
        draft.payload["vary"],
        method=draft.payload["method"],
        timeout_seconds=draft.payload.get("timeout_seconds", settings(request).timeout_seconds),
        name=draft.payload.get("name"),
    )
    # The key holds the content too: a double click is one job, going back and changing a field is another.
    content = hashlib.sha256(json.dumps(draft.payload, sort_keys=True).encode()).hexdigest()
    with database(request).write() as session:
        job, _ = queue.submit(session, submission, f"form-{nonce}-{content[:32]}")
    return RedirectResponse(prefix(request) + f"/jobs/{job.id}", status_code=303)


def _form_page(request: Request, draft: Draft, nonce: str, status: int = 200) -> Response:
    more = [key for key in form_fields() if key not in MAIN_FIELDS]
    vary = list(draft.payload.get("vary", {}))
    context = {
        "here": "/jobs",
        "draft": draft,
        "fields": form_fields(),
        "hints": HINTS,
        "more_fields": more,
        "more_open": any(draft.typed(key) for key in more) or bool(set(draft.errors) - set(MAIN_FIELDS)),
        "models": usable_models(),
        "gpus": list(gpus()),
        "idempotency_key": nonce,
        "preview": [_preview(spec, vary) for spec in draft.runs[:PREVIEWED]],
        "commands": _commands(request, draft.payload),
    }
    return page(request, "job_new.html", context, block="preview", status=status)


def _preview(spec: RunSpec, vary: list[str]) -> dict[str, Any]:
    predicted, missing = closed_form(spec)
    peak = predicted.memory.device_peak_bytes if predicted else None
    return {"label": run_label(spec.model_dump(), vary), "peak": peak, "missing": missing}


def _commands(request: Request, payload: Mapping[str, Any]) -> dict[str, str]:
    base = str(request.base_url).rstrip("/")
    return {"curl": as_curl(payload, base), "Python": as_python(payload, base), "Command line": as_cli(payload)}


@router.get("/jobs/{job_id}")
def show_job(request: Request, job_id: str) -> Response:
    """One job: progress while it lives, results as they land, the log's end."""
    with database(request).read() as session:
        found = queue.get(session, job_id)
        if found is None:
            raise HTTPException(404, "No job has this id.")
        job = job_view(queue.view(found))
        ahead = queue.jobs_ahead(session, found) if found.status == "queued" else None
        results = runs.of_job(session, job_id)
        lines = [line["message"] for line in log.tail(session, job_id, LOG_LINES)]
    vary = list(job.vary)
    shown = curve(results, vary=vary, prefix=prefix(request)) if results else None
    payload = {"spec": job.spec, "vary": job.vary, "method": job.method}
    left = job.runs_total - job.runs_done
    context = {
        "here": "/jobs",
        "job": job,
        "ahead": ahead,
        "method": job.method,
        "rows": [run_row(result, vary) for result in results],
        "chart": shown,
        "knee": shown.knee if shown else None,
        "time_left": time_left(run_durations(job.started_at, [result["created_at"] for result in results]), left),
        "log": "\n".join(lines),
        "log_url": prefix(request) + f"/api/v1/jobs/{job_id}/log",
        "events_url": prefix(request) + f"/api/v1/jobs/{job_id}/events",
        "specification": _specification(job),
        "environment": facts(*(result["environment"] for result in results)),
        "duplicate": query_of(job.spec, job.vary, method="" if job.method == "measured" else job.method),
        "commands": _commands(request, payload),
        "machine_form": prefix(request) + f"/jobs/{job_id}.json",
    }
    return page(request, "job.html", context, block="live")


def _specification(job: JobView) -> list[tuple[str, str, bool]]:
    """Every field, a varied one with all its values."""
    shown = {key: (value, default) for key, value, default in full_spec(job.spec)}
    shown |= {key: (", ".join(map(spell, values)), False) for key, values in job.vary.items()}
    return [(key, value, default) for key, (value, default) in shown.items()]


@router.post("/jobs/{job_id}/cancel")
def cancel_job(request: Request, job_id: str) -> Response:
    with database(request).write() as session:
        job = queue.cancel(session, job_id)
    return _back(request, job_id, job is not None)


@router.post("/jobs/{job_id}/retry")
def retry_job(request: Request, job_id: str) -> Response:
    with database(request).write() as session:
        job = queue.retry(session, job_id)
    return _back(request, job_id, job is not None)


def _back(request: Request, job_id: str, found: bool) -> Response:
    if not found:
        raise HTTPException(404, "No job has this id.")
    return RedirectResponse(prefix(request) + f"/jobs/{job_id}", status_code=303)
