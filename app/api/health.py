"""/healthz, /readyz, /metrics: for whoever watches the server. No torch, no secrets."""

from __future__ import annotations

import shutil
import sqlite3
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from sqlalchemy import text

from app.db import runs
from app.db.models import STATUSES
from app.jobs import queue
from app.jobs.worker import last_heartbeat_seconds
from app.services import Needs

router = APIRouter(tags=["health"])

WORKER_SILENT_SECONDS = 15.0
LEAST_DISK_BYTES = 64 * 2**20


@router.get("/healthz")
def healthz() -> dict[str, Any]:
    """The process is up. Touches nothing else."""
    return {"status": "ok", "version": version("remat"), "sqlite": sqlite3.sqlite_version}


@router.get("/readyz", responses={503: {"description": "Something that work needs is missing."}})
def readyz(needs: Needs) -> Response:
    """Jobs can be taken and will be worked on: the database is writable, a worker lives, the disk has room."""
    with needs.database.write() as session:
        session.execute(text("SELECT 1"))
        silent = last_heartbeat_seconds(session)
    free = shutil.disk_usage(needs.settings.data_dir).free
    checks = {
        "database": "ok",
        "worker": "ok" if silent is not None and silent < WORKER_SILENT_SECONDS else "not heard of",
        "disk": "ok" if free > LEAST_DISK_BYTES else "full",
    }
    ready = all(state == "ok" for state in checks.values())
    facts = {"ready": ready, "checks": checks, "worker_silent_seconds": silent, "disk_free_bytes": free}
    return JSONResponse(facts, 200 if ready else 503)


@router.get("/metrics", response_class=PlainTextResponse)
def metrics(needs: Needs) -> str:
    """Prometheus text."""
    with needs.database.read() as session:
        jobs = queue.counts(session)
        stored = runs.outcome_counts(session)
        waited = queue.oldest_queued_seconds(session)
        silent = last_heartbeat_seconds(session)
    lines = ["# TYPE remat_jobs gauge", *(f'remat_jobs{{status="{name}"}} {jobs.get(name, 0)}' for name in STATUSES)]
    lines += ["# TYPE remat_runs gauge"]
    lines += [f'remat_runs{{method="{method}",outcome="{outcome}"}} {n}' for (method, outcome), n in stored.items()]
    lines += ["# TYPE remat_oldest_queued_seconds gauge", f"remat_oldest_queued_seconds {waited:.3f}"]
    if silent is not None:
        lines += ["# TYPE remat_worker_silent_seconds gauge", f"remat_worker_silent_seconds {silent:.3f}"]
    return "\n".join(lines) + "\n"
