"""/runs and /tradeoff: results, filtered by any field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Path, Query, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field, create_model

from app import tradeoff
from app.api.schemas import RunPage, StoredRun, Tradeoff
from app.db import runs
from app.db.runs import Filters
from app.db.session import Database
from app.exports import csv_lines, parquet_bytes
from app.fields import NUMBERS
from app.services import Needs
from engine.errors import SpecError
from engine.result import Method, Outcome, Timeline
from engine.spec import RunSpec

router = APIRouter(tags=["runs"])

Id = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="A run's id.")]
Accepted = Annotated[list[Annotated[str, Field(max_length=2000)]], Field(max_length=50)]
Ids = Annotated[list[Annotated[str, Field(pattern="^[0-9a-f]{32}$")]], Field(max_length=50)]
MAX_EXPORT = 100_000


class FilterQuery(BaseModel):
    """Repeat a parameter to accept several values."""

    ids: Ids = Field(default=[], description="Only these runs.")
    job_id: Ids = []
    method: list[Method] = []
    outcome: list[Outcome] = []

    def filters(self) -> Filters:
        spec = {key: getattr(self, key) for key in RunSpec.model_fields if getattr(self, key)}
        return Filters(spec, self.job_id, self.method, self.outcome, self.ids)


def _with_spec_fields(name: str, base: type[FilterQuery]) -> Any:
    """`base` with one parameter for each RunSpec field, so that they are documented, and others refused (`queries`)."""
    fields: Any = {
        key: (Accepted, Field(default=[], description=field.description)) for key, field in RunSpec.model_fields.items()
    }
    return create_model(name, __base__=base, **fields)


class ListQuery(FilterQuery):
    sort: str = Field(
        default="-created_at", max_length=100, description="`created_at` or a numeric field by its path; - descends."
    )
    limit: int | None = Field(default=None, ge=1, le=MAX_EXPORT, description="JSON: at most 200, 50 by default.")
    cursor: str | None = Field(default=None, max_length=1000, description="`next_cursor` of the page before.")
    format: Literal["json", "csv", "parquet"] = "json"


class TradeoffQuery(FilterQuery):
    x: str = Field(default="memory.device_peak_bytes", max_length=100, description="A numeric field by its path.")
    y: str = Field(default="timing.tokens_per_second", max_length=100, description="A numeric field by its path.")


if TYPE_CHECKING:

    class RunsQuery(ListQuery): ...

    class CurveQuery(TradeoffQuery): ...

else:
    RunsQuery = _with_spec_fields("RunsQuery", ListQuery)
    CurveQuery = _with_spec_fields("CurveQuery", TradeoffQuery)


@router.get(
    "/runs",
    response_model=RunPage,
    responses={200: {"content": {"text/csv": {}, "application/vnd.apache.parquet": {}}}},
)
def list_runs(query: Annotated[RunsQuery, Query()], needs: Needs) -> Response:
    """Results, newest first, without their ledgers. As CSV or Parquet: all that match, oldest first."""
    filters = query.filters()
    if query.format == "json":
        if (query.limit or 0) > 200:
            raise SpecError("limit", "at most 200 with format=json")
        with needs.database.read() as session:
            page = runs.page(session, filters, query.sort, query.limit or 50, query.cursor)
        return JSONResponse({"items": page.items, "next_cursor": page.next_cursor})
    for name in ("sort", "cursor"):
        if name in query.model_fields_set:
            raise SpecError(name, "only with format=json: a file holds all that match, oldest first")
    limit = query.limit or MAX_EXPORT
    if query.format == "csv":
        _check(needs.database, filters)
        lines = csv_lines(_stored(needs.database, filters, limit))
        return StreamingResponse(lines, media_type="text/csv; charset=utf-8", headers=_attachment("csv"))
    content = parquet_bytes(_stored(needs.database, filters, limit))
    return Response(content, media_type="application/vnd.apache.parquet", headers=_attachment("parquet"))


def _check(database: Database, filters: Filters) -> None:
    """A bad filter is answered 422, which a stream that has begun no longer could."""
    with database.read() as session:
        next(runs.every(session, filters, 1), None)


def _stored(database: Database, filters: Filters, limit: int) -> Iterator[dict[str, Any]]:
    with database.read() as session:
        yield from runs.every(session, filters, limit)


def _attachment(suffix: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="remat-runs.{suffix}"'}


@router.get("/runs/{run_id}", response_model=StoredRun)
def read_run(run_id: Id, needs: Needs) -> Response:
    """One result, with its ledger where it has one."""
    with needs.database.read() as session:
        result = runs.get(session, run_id)
    if result is None:
        raise HTTPException(404, "no such run")
    return JSONResponse(result)


@router.get("/runs/{run_id}/timeline", response_model=Timeline)
def read_timeline(run_id: Id, needs: Needs) -> Response:
    """Live bytes by category over one step."""
    with needs.database.read() as session:
        found = runs.timeline(session, run_id)
    if found is None:
        raise HTTPException(404, "no such run, or a run without a timeline")
    return JSONResponse(found)


@router.get("/tradeoff", response_model=Tradeoff)
def read_tradeoff(query: Annotated[CurveQuery, Query()], needs: Needs) -> Response:
    """Matching runs on two axes. Frontier and knee are of the runs that ended well and are known on both."""
    for name, axis in (("x", query.x), ("y", query.y)):
        if axis not in NUMBERS:
            raise SpecError(name, f"one of {', '.join(NUMBERS)}")
    with needs.database.read() as session:
        found = runs.points(session, query.filters())
    return JSONResponse(curve(found, query.x, query.y))


def curve(found: list[dict[str, Any]], x: str, y: str) -> dict[str, Any]:
    """Points (of `runs.points`) with their coordinates, the frontier's ids and the knee's."""
    points = [
        {key: row[key] for key in ("id", "job_id", "method", "outcome", "spec")}
        | {"x": row["numbers"].get(x), "y": row["numbers"].get(y)}
        for row in found
    ]
    known = [
        tradeoff.Point(point["id"], point["x"], point["y"])
        for point in points
        if point["outcome"] == "ok" and point["x"] is not None and point["y"] is not None
    ]
    better = {"x_up": tradeoff.more_is_better(x), "y_up": tradeoff.more_is_better(y)}
    best = tradeoff.knee(known, **better)
    front = [point.id for point in tradeoff.frontier(known, **better)]
    return {"x": x, "y": y, "points": points, "frontier": front, "knee": best.id if best else None}
