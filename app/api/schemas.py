"""Bodies and answers of the REST API that are not RunSpec or RunResult themselves."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from engine.result import Method, RunResult
from engine.spec import RunSpec

Status = Literal["queued", "running", "cancelling", "succeeded", "failed", "cancelled", "timed_out"]


def _text(value: str) -> str:
    if not value.isprintable():
        raise ValueError("must be one line of printable text: no control or direction characters")
    return value


Line = Annotated[str, AfterValidator(_text)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class PredictionRequest(Body):
    spec: RunSpec
    method: Literal["closed-form", "simulated"] = "closed-form"


class JobRequest(Body):
    name: Annotated[Line, Field(max_length=200)] | None = None
    spec: dict[str, Any] = Field(description="RunSpec fields that all runs share; the rest keep their defaults.")
    vary: dict[str, list[Any]] = Field(default_factory=dict, description="RunSpec fields and the values to combine.")
    method: Method = "measured"
    timeout_seconds: Annotated[float, Field(strict=True, ge=1, le=604_800)] | None = None
    priority: Annotated[int, Field(strict=True, ge=-100, le=100)] = 0


class Progress(BaseModel):
    run: int
    runs: int
    spec: dict[str, Any]
    phase: str | None
    step: int | None
    steps: int | None


class JobView(BaseModel):
    """A job as clients see it."""

    id: str
    name: str | None
    status: Status
    method: Method
    spec: dict[str, Any]
    vary: dict[str, list[Any]]
    runs_total: int
    runs_done: int
    progress: Progress | None
    priority: int
    timeout_seconds: float
    attempt: int
    error: str | None
    created_at: str
    started_at: str | None
    finished_at: str | None


class JobPage(BaseModel):
    items: list[JobView]
    next_cursor: str | None


class LogLine(BaseModel):
    id: int
    at: str
    message: str


class LogPage(BaseModel):
    lines: list[LogLine]
    next_after: int
    """Pass as `after` to get only newer lines."""


class StoredRun(RunResult):
    job_id: str | None = None


class RunPage(BaseModel):
    items: list[StoredRun]
    next_cursor: str | None


class TradeoffPoint(BaseModel):
    id: str
    job_id: str | None
    method: Method
    outcome: Literal["ok", "oom", "failed"]
    spec: dict[str, Any]
    x: float | None
    y: float | None


class Tradeoff(BaseModel):
    x: str
    y: str
    points: list[TradeoffPoint]
    frontier: list[str]
    knee: str | None
