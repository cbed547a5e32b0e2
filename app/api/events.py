"""What happens to a job, as it happens: for server-sent events, in JSON or in HTML."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from anyio.to_thread import run_sync

from app.db import runs
from app.jobs import log, queue
from app.services import Services

POLL_SECONDS = 0.4
LINES_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Place:
    """How far a reader has come: the last run and the last log line it has seen. Its text is the event's id."""

    run: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.run}-{self.line}"

    @classmethod
    def read(cls, text: str | None) -> Self:
        run, _, line = (text or "-0").partition("-")
        return cls(run, int(line))


@dataclass(frozen=True, slots=True)
class Happening:
    kind: Literal["job", "run", "log", "end"]
    data: dict[str, Any]
    """`job` and `end`: the job; `run`: the result; `log`: {"id", "at", "message"}."""
    place: str


async def follow(needs: Services, job_id: str, place: Place) -> AsyncIterator[Happening]:
    """Everything after `place`, then what comes, until the job has ended or the server stops.

    An unknown job ends at once. Nothing is missed: state, runs and lines are read in one snapshot.
    """
    shown: dict[str, Any] | None = None
    while not needs.stopping.is_set():
        job, results, lines = await run_sync(_snapshot, needs, job_id, place)
        if job is None:
            return
        for line in lines:
            place = replace(place, line=line["id"])
            yield Happening("log", line, str(place))
        for result in results:
            place = replace(place, run=result["id"])
            yield Happening("run", result, str(place))
        if job != shown:
            shown = job
            yield Happening("job", job, str(place))
        if queue.is_final(job["status"]) and len(lines) < LINES_AT_ONCE:
            yield Happening("end", job, str(place))
            return
        await asyncio.sleep(POLL_SECONDS)


def _snapshot(
    needs: Services, job_id: str, place: Place
) -> tuple[dict[str, Any] | None, list[dict[str, Any]], list[dict[str, Any]]]:
    with needs.database.read() as session:
        job = queue.get(session, job_id)
        if job is None:
            return None, [], []
        lines = log.after(session, job_id, place.line, LINES_AT_ONCE)
        return queue.view(job), runs.of_job_after(session, job_id, place.run), lines
