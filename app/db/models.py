"""Tables. JSON columns hold RunSpec and RunResult as the API shows them; what is filtered or sorted stands beside."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime
from typing import Any, ClassVar

from sqlalchemy import JSON, CheckConstraint, Dialect, ForeignKey, Index, MetaData, String, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

STATUSES = ("queued", "running", "cancelling", "succeeded", "failed", "cancelled", "timed_out")
FINAL = ("succeeded", "failed", "cancelled", "timed_out")
LIVE = ("running", "cancelling")
METHODS = ("closed-form", "simulated", "measured")
LANES = ("benchmark", "simulation")


def now() -> datetime:
    return datetime.now(UTC)


_last_id_ns = 0


def new_id() -> str:
    """32 hex digits: nanoseconds since the epoch, then chance. In one process each sorts after the one before."""
    global _last_id_ns
    _last_id_ns = max(_last_id_ns + 1, time.time_ns())
    return f"{_last_id_ns:016x}{secrets.token_hex(8)}"


def in_set(column: str, values: tuple[str, ...]) -> str:
    """The SQL condition that a column holds one of a few words."""
    return f"{column} IN ({', '.join(repr(value) for value in values)})"


class Moment(TypeDecorator[datetime]):
    """A UTC time as ISO text of fixed width, which sorts and compares as time does."""

    impl = String(27)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> str | None:
        return None if value is None else iso(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        return None if value is None else datetime.fromisoformat(value)


def iso(value: datetime) -> str:
    """2026-11-29T16:58:19.123456Z"""
    return value.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {datetime: Moment(), dict[str, Any]: JSON(none_as_null=True)}


class Job(Base):
    """What a user submitted: a base spec and the fields that vary. The row is the queue's only truth."""

    __tablename__ = "jobs"
    __table_args__ = (
        CheckConstraint(in_set("status", STATUSES), name="status"),
        CheckConstraint(in_set("method", METHODS), name="method"),
        CheckConstraint(in_set("lane", LANES), name="lane"),
        Index("ix_jobs_queue", "status", "lane", "priority", "id"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True, default=new_id)
    name: Mapped[str | None] = mapped_column(String(200))
    method: Mapped[str] = mapped_column(String(16))
    lane: Mapped[str] = mapped_column(String(16))
    status: Mapped[str] = mapped_column(String(16), default="queued")
    priority: Mapped[int] = mapped_column(default=0)
    spec: Mapped[dict[str, Any]]
    vary: Mapped[dict[str, Any]]
    timeout_seconds: Mapped[float]
    runs_total: Mapped[int]
    runs_done: Mapped[int] = mapped_column(default=0)
    progress: Mapped[dict[str, Any] | None]
    """{"run", "runs", "run_id", "spec", "phase", "step", "steps"} of the run going on."""
    error: Mapped[str | None]
    attempt: Mapped[int] = mapped_column(default=0)
    attempt_token: Mapped[str | None] = mapped_column(String(32))
    """Who may write to this row and its runs: an attempt that lost its lease has another one."""
    worker: Mapped[str | None] = mapped_column(ForeignKey("workers.id", ondelete="SET NULL"))
    lease_expires_at: Mapped[datetime | None]
    losses: Mapped[int] = mapped_column(default=0)
    """Workers lost in a row without a new result."""
    idempotency_key: Mapped[str | None] = mapped_column(String(200), unique=True)
    request_hash: Mapped[str | None] = mapped_column(String(64))
    created_at: Mapped[datetime] = mapped_column(default=now)
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]


class Run(Base):
    """One result. `job_id` is NULL for what the command line measured."""

    __tablename__ = "runs"
    __table_args__ = (
        UniqueConstraint("job_id", "spec_hash", "method", name="uq_runs_once"),
        CheckConstraint(in_set("method", METHODS), name="method"),
        CheckConstraint(in_set("outcome", ("ok", "oom", "failed")), name="outcome"),
        Index("ix_runs_created_at_id", "created_at", "id"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    spec_hash: Mapped[str] = mapped_column(String(16), index=True)
    method: Mapped[str] = mapped_column(String(16))
    outcome: Mapped[str] = mapped_column(String(8))
    spec: Mapped[dict[str, Any]]
    numbers: Mapped[dict[str, Any]]
    """Every numeric field of the result by its dotted path: what lists are sorted and curves drawn by."""
    result: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]


class Timeline(Base):
    """A run's memory timeline, apart because it is large and seldom read."""

    __tablename__ = "timelines"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    timeline: Mapped[dict[str, Any]]


class LogLine(Base):
    __tablename__ = "log_lines"
    __table_args__ = (Index("ix_log_lines_job_id_id", "job_id", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    at: Mapped[datetime] = mapped_column(default=now)
    message: Mapped[str]


class Worker(Base):
    """A worker process and when it was last heard of."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(String(200), primary_key=True)
    host: Mapped[str] = mapped_column(String(100))
    pid: Mapped[int]
    pid_started: Mapped[float]
    """Seconds since the epoch, as the kernel tells: a pid alone may have been given to another process."""
    heartbeat_at: Mapped[datetime]


class Prediction(Base):
    """A simulated answer, kept for as long as the engine's code is the same."""

    __tablename__ = "predictions"

    spec_hash: Mapped[str] = mapped_column(String(16), primary_key=True)
    method: Mapped[str] = mapped_column(String(16), primary_key=True)
    code_version: Mapped[str] = mapped_column(String(16), primary_key=True)
    result: Mapped[dict[str, Any]]
    timeline: Mapped[dict[str, Any] | None]
    created_at: Mapped[datetime] = mapped_column(default=now)
