"""/jobs: submit, watch, cancel, retry."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, HTTPException, Path, Query, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import Field

from app.api.events import Place, follow
from app.api.schemas import JobPage, JobRequest, JobView, Line, LogPage, Status
from app.api.strict_json import StrictRoute
from app.db.models import Job
from app.jobs import log, queue
from app.services import Needs

router = APIRouter(prefix="/jobs", tags=["jobs"], route_class=StrictRoute)

Id = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="A job's id.")]
Key = Annotated[
    Line | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        description="The same key and body is the same job; another body is refused.",
    ),
]


@router.post("", status_code=202, response_model=JobView)
def submit_job(
    body: JobRequest, request: Request, response: Response, needs: Needs, idempotency_key: Key = None
) -> dict[str, Any]:
    """Queue a job. It is stored when this answers, and survives whatever happens to the server afterwards."""
    submission = queue.prepare(
        body.spec,
        body.vary,
        method=body.method,
        timeout_seconds=body.timeout_seconds or needs.settings.timeout_seconds,
        name=body.name,
        priority=body.priority,
    )
    with needs.database.write() as session:
        job, _ = queue.submit(session, submission, idempotency_key)
        response.headers["Location"] = str(request.url_for("read_job", job_id=job.id).path)
        return queue.view(job)


@router.get("", response_model=JobPage)
def list_jobs(
    needs: Needs,
    status: Annotated[list[Status] | None, Query(description="Only jobs in one of these states.")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(pattern="^[0-9a-f]{32}$")] = None,
) -> dict[str, Any]:
    """Jobs, newest first."""
    with needs.database.read() as session:
        jobs, following = queue.page(session, status or (), limit, cursor)
        return {"items": [queue.view(job) for job in jobs], "next_cursor": following}


@router.get("/{job_id}", response_model=JobView)
def read_job(job_id: Id, needs: Needs) -> dict[str, Any]:
    with needs.database.read() as session:
        return queue.view(_found(queue.get(session, job_id)))


@router.get("/{job_id}/log", response_model=LogPage)
def read_log(
    job_id: Id,
    needs: Needs,
    after: Annotated[int, Query(ge=0, le=2**62, description="Only lines after this id.")] = 0,
    limit: Annotated[int, Query(ge=1, le=5000)] = 1000,
) -> dict[str, Any]:
    with needs.database.read() as session:
        _found(queue.get(session, job_id))
        lines = log.after(session, job_id, after, limit)
        return {"lines": lines, "next_after": lines[-1]["id"] if lines else after}


@router.post("/{job_id}/cancel", status_code=202, response_model=JobView)
def cancel_job(job_id: Id, needs: Needs) -> dict[str, Any]:
    """Stop a job. Cancelling a finished or cancelled job changes nothing."""
    with needs.database.write() as session:
        return queue.view(_found(queue.cancel(session, job_id)))


@router.post("/{job_id}/retry", status_code=202, response_model=JobView)
def retry_job(job_id: Id, needs: Needs) -> dict[str, Any]:
    """Go on with a failed, cancelled or timed-out job where it stopped. Any other job stays as it is."""
    with needs.database.write() as session:
        return queue.view(_found(queue.retry(session, job_id)))


def known_job(job_id: Id, needs: Needs) -> str:
    """A stream that has begun can no longer be a 404."""
    with needs.database.read() as session:
        return _found(queue.get(session, job_id)).id


@router.get("/{job_id}/events", response_class=EventSourceResponse)
async def job_events(
    job_id: Annotated[str, Depends(known_job)],
    needs: Needs,
    last_event_id: Annotated[
        str | None,
        Header(alias="Last-Event-ID", max_length=100, description="Resume after this event."),
        Field(pattern=r"^[0-9a-f]{0,32}-[0-9]{1,18}$"),
    ] = None,
) -> AsyncIterator[ServerSentEvent]:
    """Server-sent events until the job has ended: `job` (its state), `run` (a result), `log` (a line), `end`."""
    async for happening in follow(needs, job_id, Place.read(last_event_id)):
        yield ServerSentEvent(data=happening.data, event=happening.kind, id=happening.place)


def _found(job: Job | None) -> Job:
    if job is None:
        raise HTTPException(404, "no such job")
    return job
