"""A job's log: bounded, plain lines. The SQL of the log_lines table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, insert, select
from sqlalchemy.orm import Session

from app.db.models import LogLine, iso, now

MAX_LINE = 4000  # characters
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")


def clean(text: str) -> str:
    """One printable line: no ANSI colours, no control characters, of bounded length."""
    return _CONTROL.sub("", text.encode("utf-8", "replace").decode())[:MAX_LINE]


def append(session: Session, job_id: str, messages: Sequence[str], limit_bytes: int) -> None:
    """Add lines; past the limit, one line says that the rest was dropped and no more are kept."""
    size = session.scalar(select(func.coalesce(func.sum(func.length(LogLine.message)), 0)).where(_of(job_id))) or 0
    rows: list[dict[str, Any]] = []
    for message in map(clean, messages):
        if size > limit_bytes:
            break
        size += len(message)
        kept = message if size <= limit_bytes else "… the log is full; later lines are not kept"
        rows.append({"job_id": job_id, "at": now(), "message": kept})
    if rows:
        session.execute(insert(LogLine), rows)


def after(session: Session, job_id: str, last_id: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
    """{"id", "at", "message"} of the lines after `last_id`, oldest first."""
    chosen = select(LogLine).where(_of(job_id), LogLine.id > last_id).order_by(LogLine.id).limit(limit)
    return [_shown(line) for line in session.scalars(chosen)]


def tail(session: Session, job_id: str, limit: int = 200) -> list[dict[str, Any]]:
    """The last lines, oldest first."""
    chosen = select(LogLine).where(_of(job_id)).order_by(LogLine.id.desc()).limit(limit)
    return [_shown(line) for line in session.scalars(chosen)][::-1]


def _of(job_id: str) -> Any:
    return LogLine.job_id == job_id


def _shown(line: LogLine) -> dict[str, Any]:
    return {"id": line.id, "at": iso(line.at), "message": line.message}
