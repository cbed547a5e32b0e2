"""The queue: the jobs table, and every way a row of it may change.

    queued ──► running ──► succeeded | failed | timed_out
      │          │
      └──────────┴─► (cancelling) ──► cancelled

Each change is an UPDATE guarded by the id, the state and (for a worker) the attempt's token, and counts its rows:
an attempt that lost its lease changes nothing. Nothing here commits; see `Database.write`.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

from sqlalchemy import CursorResult, delete, func, select, update
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import Session

from app.db import runs
from app.db.models import FINAL, LIVE, Job, Run, iso, new_id, now
from app.errors import KeyReused, LeaseLost
from app.jobs import log
from app.jobs.process import host_name, is_alive
from engine.methods import expand_for
from engine.result import Method, RunResult, Timeline


@dataclass(frozen=True, slots=True)
class Submission:
    """A job checked and counted, before any transaction: expanding a grid takes longer than a lock should be held."""

    spec: Mapping[str, Any]
    vary: Mapping[str, Sequence[Any]]
    method: str
    runs_total: int
    timeout_seconds: float
    name: str | None = None
    priority: int = 0

    @property
    def request_hash(self) -> str:
        fields = (self.name, self.spec, self.vary, self.method, self.timeout_seconds, self.priority)
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def prepare(
    spec: Mapping[str, Any],
    vary: Mapping[str, Sequence[Any]] | None = None,
    *,
    method: Method = "measured",
    timeout_seconds: float,
    name: str | None = None,
    priority: int = 0,
) -> Submission:
    """Check a job. Raises SpecError or pydantic's ValidationError where a run of it would be refused."""
    grid = expand_for(method, spec, vary or {})
    return Submission(dict(spec), dict(vary or {}), method, len(grid), timeout_seconds, name, priority)


def submit(session: Session, submission: Submission, idempotency_key: str | None = None) -> tuple[Job, bool]:
    """The job and whether it is new: the same key and request is the same job. Raises KeyReused for another request."""
    job_id = session.scalar(
        insert(Job)
        .values(
            id=new_id(),
            name=submission.name,
            method=submission.method,
            lane="benchmark" if submission.method == "measured" else "simulation",
            status="queued",
            priority=submission.priority,
            spec=submission.spec,
            vary=submission.vary,
            timeout_seconds=submission.timeout_seconds,
            runs_total=submission.runs_total,
            runs_done=0,
            attempt=0,
            losses=0,
            idempotency_key=idempotency_key,
            request_hash=submission.request_hash,
            created_at=now(),
        )
        .on_conflict_do_nothing(index_elements=[Job.idempotency_key])
        .returning(Job.id)
    )
    if job_id is not None:
        return session.get_one(Job, job_id), True
    job = session.scalars(select(Job).where(Job.idempotency_key == idempotency_key)).one()
    if job.request_hash != submission.request_hash:
        raise KeyReused("this Idempotency-Key was used for a different request")
    return job, False


def get(session: Session, job_id: str) -> Job | None:
    return session.get(Job, job_id)


def page(
    session: Session, statuses: Sequence[str] = (), limit: int = 50, before_id: str | None = None
) -> tuple[list[Job], str | None]:
    """Jobs, newest first, and the id to continue before (None on the last page)."""
    statement = select(Job).order_by(Job.id.desc()).limit(limit + 1)
    if statuses:
        statement = statement.where(Job.status.in_(statuses))
    if before_id is not None:
        statement = statement.where(Job.id < before_id)
    jobs = list(session.scalars(statement))
    return jobs[:limit], jobs[limit - 1].id if len(jobs) > limit else None


def counts(session: Session) -> dict[str, int]:
    """Jobs by status."""
    rows = session.execute(select(Job.status, func.count()).group_by(Job.status))
    return dict(rows.all())


def oldest_queued_seconds(session: Session) -> float:
    """How long the job that has waited longest has waited; 0 for an empty queue."""
    oldest = session.scalar(select(func.min(Job.created_at)).where(Job.status == "queued"))
    return 0.0 if oldest is None else max((now() - oldest).total_seconds(), 0.0)


def jobs_ahead(session: Session, job: Job) -> int:
    """Jobs of the same lane that will start before this queued one, running ones included."""
    ahead = (Job.priority > job.priority) | ((Job.priority == job.priority) & (Job.id < job.id))
    waiting = (Job.status == "queued") & ahead
    chosen = select(func.count()).select_from(Job).where(Job.lane == job.lane, waiting | Job.status.in_(LIVE))
    return session.scalar(chosen) or 0


def claim(session: Session, worker: str, lane: str, lease_seconds: float) -> Job | None:
    """Take the first queued job of the lane: highest priority, then oldest."""
    waiting = select(Job.id).where(Job.status == "queued", Job.lane == lane)
    job_id = session.scalar(waiting.order_by(Job.priority.desc(), Job.id).limit(1))
    if job_id is None:
        return None
    taken = _change(
        session,
        job_id,
        ("queued",),
        status="running",
        attempt=Job.attempt + 1,
        attempt_token=secrets.token_hex(16),
        worker=worker,
        lease_expires_at=now() + timedelta(seconds=lease_seconds),
        started_at=func.coalesce(Job.started_at, iso(now())),
        progress=None,
        error=None,
    )
    return session.get_one(Job, job_id, populate_existing=True) if taken else None


def renew(session: Session, job_id: str, token: str, lease_seconds: float, progress: dict[str, Any] | None) -> str:
    """Prolong the lease and show how far the job is. The job's status; raises LeaseLost if it is another's now."""
    lease = now() + timedelta(seconds=lease_seconds)
    if not _change(session, job_id, LIVE, token, lease_expires_at=lease, progress=progress):
        raise LeaseLost(f"job {job_id} was taken from this worker")
    return session.scalars(select(Job.status).where(Job.id == job_id)).one()


def store(session: Session, job_id: str, token: str, result: RunResult, timeline: Timeline | None) -> bool:
    """Keep a result of this attempt; False if the job already has it. Raises LeaseLost for an attempt that is over."""
    if not _change(session, job_id, LIVE, token, losses=0):
        raise LeaseLost(f"job {job_id} was taken from this worker")
    added = runs.add(session, result, timeline, job_id)
    done = select(func.count()).select_from(Run).where(Run.job_id == job_id).scalar_subquery()
    _change(session, job_id, LIVE, token, runs_done=done)
    return added


def done_hashes(session: Session, job_id: str) -> set[str]:
    """spec_hash of every run that the job has a result for."""
    return set(session.scalars(select(Run.spec_hash).where(Run.job_id == job_id)))


def failures(session: Session, job_id: str) -> list[str | None]:
    """The error of each of the job's failed runs."""
    chosen = select(Run.result).where(Run.job_id == job_id, Run.outcome == "failed").order_by(Run.id)
    return [result.get("error") for result in session.scalars(chosen)]


def finish(session: Session, job_id: str, token: str, status: str, error: str | None = None) -> str:
    """End an attempt. A job being cancelled ends cancelled, whatever `status` says. Raises LeaseLost."""
    ending = {"finished_at": now(), "attempt_token": None, "lease_expires_at": None, "progress": None}
    if _change(session, job_id, ("running",), token, status=status, error=error, **ending):
        return status
    if _change(session, job_id, ("cancelling",), token, status="cancelled", **ending):
        return "cancelled"
    raise LeaseLost(f"job {job_id} was taken from this worker")


def release(session: Session, job_id: str, token: str) -> None:
    """Give a job back unfinished (the worker is stopping): it goes on where it stopped."""
    idle: dict[str, Any] = {"attempt_token": None, "lease_expires_at": None, "progress": None, "worker": None}
    if not _change(session, job_id, ("running",), token, status="queued", **idle):
        _change(session, job_id, ("cancelling",), token, status="cancelled", finished_at=now(), **idle)


def reap(session: Session, max_losses: int) -> list[str]:
    """Queue again every job whose worker is gone. The ids.

    On this host a worker is gone when its process is (a suspended machine expires no leases); on another, when its
    lease has run out.
    """
    gone = []
    for job in session.scalars(select(Job).where(Job.status.in_(LIVE))).all():
        if not _abandoned(job):
            continue
        gone.append(job.id)
        idle: dict[str, Any] = {"attempt_token": None, "lease_expires_at": None, "progress": None, "worker": None}
        if job.status == "cancelling":
            _change(session, job.id, LIVE, job.attempt_token, status="cancelled", finished_at=now(), **idle)
        elif job.losses + 1 >= max_losses:
            reason = f"the worker died {job.losses + 1} times in a row while it ran this job"
            ending = {"status": "failed", "error": reason, "finished_at": now()}
            _change(session, job.id, LIVE, job.attempt_token, **ending, **idle)
        else:
            _change(session, job.id, LIVE, job.attempt_token, status="queued", losses=job.losses + 1, **idle)
        log.append(session, job.id, [f"attempt {job.attempt} lost its worker"], limit_bytes=2**22)
    return gone


def _abandoned(job: Job) -> bool:
    host, pid, started = (job.worker or "?/0/0").rsplit("/", 2)
    if host == host_name():
        return not is_alive(int(pid), float(started))
    return job.lease_expires_at is None or job.lease_expires_at < now()


def cancel(session: Session, job_id: str) -> Job | None:
    """Stop a job: at once if it waits, as soon as its run has died if it runs. A finished job stays as it is."""
    if not _change(session, job_id, ("queued",), status="cancelled", finished_at=now()):
        _change(session, job_id, ("running",), status="cancelling")
    return session.get(Job, job_id, populate_existing=True)


def retry(session: Session, job_id: str) -> Job | None:
    """Queue a failed, cancelled or timed-out job again. Its good results stay; its failed runs are run again."""
    fresh: dict[str, Any] = {"error": None, "finished_at": None, "started_at": None, "losses": 0, "worker": None}
    if _change(session, job_id, ("failed", "cancelled", "timed_out"), status="queued", **fresh):
        session.execute(delete(Run).where(Run.job_id == job_id, Run.outcome == "failed"))
        done = select(func.count()).select_from(Run).where(Run.job_id == job_id).scalar_subquery()
        _change(session, job_id, ("queued",), runs_done=done)
    return session.get(Job, job_id, populate_existing=True)


def _change(session: Session, job_id: str, states: Sequence[str], token: str | None = None, **values: Any) -> bool:
    """The guarded UPDATE; whether it hit its one row."""
    statement = update(Job).where(Job.id == job_id, Job.status.in_(states))
    if token is not None:
        statement = statement.where(Job.attempt_token == token)
    done = session.execute(statement.values(**values).execution_options(synchronize_session=False))
    return cast("CursorResult[Any]", done).rowcount == 1


def view(job: Job) -> dict[str, Any]:
    """A job as the API shows it."""
    return {
        "id": job.id,
        "name": job.name,
        "status": job.status,
        "method": job.method,
        "spec": job.spec,
        "vary": job.vary,
        "runs_total": job.runs_total,
        "runs_done": job.runs_done,
        "progress": job.progress,
        "priority": job.priority,
        "timeout_seconds": job.timeout_seconds,
        "attempt": job.attempt,
        "error": job.error,
        "created_at": iso(job.created_at),
        "started_at": iso(job.started_at) if job.started_at else None,
        "finished_at": iso(job.finished_at) if job.finished_at else None,
    }


def is_final(status: str) -> bool:
    return status in FINAL
