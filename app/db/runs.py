"""Results: the SQL of the runs and timelines tables."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar, get_args, get_origin

from sqlalchemy import ColumnElement, Select, String, and_, func, or_, select, type_coerce
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import Session

from app.db.models import Run, Timeline, iso
from app.fields import NUMBERS, OPTIONAL, SPEC_TYPES, numbers, read
from engine.errors import SpecError
from engine.result import RunResult
from engine.result import Timeline as MemoryTimeline
from engine.spec import RunSpec

Statement = TypeVar("Statement", bound="Select[*tuple[Any, ...]]")

MAX_POINTS = 20_000  # of one curve; a page cannot draw more
ID = re.compile(r"[0-9a-f]{32}")
_ACCEPTED = {bool: "true or false", int: "a whole number", float: "a number", str: "printable text"}


@dataclass(frozen=True, slots=True)
class Filters:
    """Which runs. Several values of one key mean any of them; keys are combined with and."""

    spec: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """RunSpec key -> accepted values as text."""
    job_id: Sequence[str] = ()
    method: Sequence[str] = ()
    outcome: Sequence[str] = ()
    ids: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Page:
    items: list[dict[str, Any]]
    next_cursor: str | None


def add(session: Session, result: RunResult, timeline: MemoryTimeline | None = None, job_id: str | None = None) -> bool:
    """Store a result; False if the job already has one for this spec and method."""
    shown = result.model_dump(mode="json")
    added = session.scalar(
        insert(Run)
        .values(
            id=result.id,
            job_id=job_id,
            spec_hash=result.spec_hash,
            method=result.method,
            outcome=result.outcome,
            spec=shown["spec"],
            numbers=numbers(shown),
            result=shown,
            created_at=result.created_at,
        )
        .on_conflict_do_nothing()
        .returning(Run.id)
    )
    if added is not None and timeline is not None:
        session.add(Timeline(run_id=result.id, timeline=timeline.model_dump(mode="json")))
    return added is not None


def get(session: Session, run_id: str) -> dict[str, Any] | None:
    """The RunResult as JSON, with its `job_id`."""
    run = session.get(Run, run_id)
    return None if run is None else _shown(run.result, run.job_id)


def timeline(session: Session, run_id: str) -> dict[str, Any] | None:
    return session.scalar(select(Timeline.timeline).where(Timeline.run_id == run_id))


def of_job(session: Session, job_id: str) -> list[dict[str, Any]]:
    """A job's results in the order they came, without their ledgers."""
    rows = session.execute(select(Run.result, Run.job_id).where(Run.job_id == job_id).order_by(Run.id))
    return [_brief(result, job) for result, job in rows]


def of_job_after(session: Session, job_id: str, last_id: str) -> list[dict[str, Any]]:
    """The job's results stored after the one named (ids sort by time of storing)."""
    rows = session.execute(select(Run.result).where(Run.job_id == job_id, Run.id > last_id).order_by(Run.id))
    return [_brief(result, job_id) for (result,) in rows]


def page(
    session: Session, filters: Filters, sort: str = "-created_at", limit: int = 50, cursor: str | None = None
) -> Page:
    """One page of results without ledgers. `sort` is `created_at` or a numeric field, `-` before it for descending.

    Raises SpecError for an unknown field or a cursor that this sort did not make.
    """
    key, descending = _sort_key(sort)
    unknown = key.is_(None)
    value = func.ifnull(key, 0)
    statement = _filtered(select(Run.result, Run.job_id, Run.id, unknown, value), filters)
    if cursor is not None:
        after_unknown, after, after_id = _read_cursor(cursor, sort)
        beyond = value < after if descending else value > after
        tie = Run.id < after_id if descending else Run.id > after_id
        statement = statement.where(
            or_(unknown > after_unknown, and_(unknown == after_unknown, or_(beyond, and_(value == after, tie))))
        )
    order = (value.desc(), Run.id.desc()) if descending else (value, Run.id)
    rows = session.execute(statement.order_by(unknown, *order).limit(limit + 1)).all()
    items = [_brief(result, job_id) for result, job_id, *_ in rows[:limit]]
    if len(rows) <= limit:
        return Page(items, None)
    _, _, last_id, last_unknown, last = rows[limit - 1]
    return Page(items, _cursor(sort, int(last_unknown), last, last_id))


def every(session: Session, filters: Filters, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """All matching results, oldest first, read as they are consumed."""
    statement = _filtered(select(Run.result, Run.job_id), filters).order_by(Run.created_at, Run.id).limit(limit)
    for result, job_id in session.execute(statement.execution_options(yield_per=500)):
        yield _brief(result, job_id)


def points(session: Session, filters: Filters) -> list[dict[str, Any]]:
    """What a curve needs of the newest MAX_POINTS matching runs: id, job_id, method, outcome, spec, numbers."""
    columns = (Run.id, Run.job_id, Run.method, Run.outcome, Run.spec, Run.numbers)
    statement = _filtered(select(*columns), filters).order_by(Run.created_at.desc(), Run.id.desc()).limit(MAX_POINTS)
    return [dict(row._mapping) for row in session.execute(statement)][::-1]


def count(session: Session, filters: Filters) -> int:
    return session.scalar(_filtered(select(func.count()).select_from(Run), filters)) or 0


def outcome_counts(session: Session) -> dict[tuple[str, str], int]:
    """(method, outcome) -> stored runs."""
    rows = session.execute(select(Run.method, Run.outcome, func.count()).group_by(Run.method, Run.outcome))
    return {(method, outcome): number for method, outcome, number in rows}


def _shown(result: dict[str, Any], job_id: str | None) -> dict[str, Any]:
    return {**result, "job_id": job_id}


def _brief(result: dict[str, Any], job_id: str | None) -> dict[str, Any]:
    """A ledger has hundreds of rows; lists leave it to GET /runs/{id}."""
    return {**result, "job_id": job_id, "ledger": None}


def _filtered(statement: Statement, filters: Filters) -> Statement:
    for column, accepted in (
        (Run.job_id, filters.job_id),
        (Run.method, filters.method),
        (Run.outcome, filters.outcome),
        (Run.id, filters.ids),
    ):
        if accepted:
            statement = statement.where(column.in_(accepted))
    for key, accepted in filters.spec.items():
        statement = statement.where(or_(*(_spec_is(key, text) for text in accepted)))
    return statement


def _spec_is(key: str, text: str) -> ColumnElement[bool]:
    """The spec's field equals the value that `text` spells. JSON true and false are 1 and 0 in SQLite."""
    if key not in SPEC_TYPES:
        raise SpecError(key, f"no such field; one of {', '.join(SPEC_TYPES)}")
    value = read(key, text)
    _check(key, value)
    found = func.json_extract(Run.spec, f"$.{key}")
    return found.is_(None) if value is None else found == value


def _check(key: str, value: Any) -> None:
    """A value that no run can have is a mistake, which an empty list would hide."""
    annotation, types = RunSpec.model_fields[key].annotation, SPEC_TYPES[key]
    if get_origin(annotation) is Literal and value not in get_args(annotation):
        raise SpecError(key, f"one of {', '.join(get_args(annotation))}")
    if isinstance(value, str) and not (str in types and value.isprintable()):
        accepted = [what for kind, what in _ACCEPTED.items() if kind in types]
        raise SpecError(key, "must be " + " or ".join([*accepted, "none"] if key in OPTIONAL else accepted))
    if isinstance(value, int | float) and not _can_be_stored(value):
        raise SpecError(key, "the number is too large")


def _can_be_stored(number: float) -> bool:
    """SQLite's integers have 64 bits."""
    return abs(number) < 2**63 if isinstance(number, int) else math.isfinite(number)


def _sort_key(sort: str) -> tuple[ColumnElement[Any], bool]:
    name = sort.removeprefix("-")
    if name == "created_at":
        return type_coerce(Run.created_at, String), sort.startswith("-")
    if name not in NUMBERS:
        raise SpecError("sort", f"one of created_at, {', '.join(NUMBERS)}; a - before it sorts descending")
    return func.json_extract(Run.numbers, f'$."{name}"'), sort.startswith("-")


def _cursor(sort: str, unknown: int, value: float | str, run_id: str) -> str:
    return base64.urlsafe_b64encode(json.dumps([sort, unknown, value, run_id]).encode()).decode()


def _read_cursor(cursor: str, sort: str) -> tuple[int, float | str, str]:
    """(unknown, value, id) of the row it stands for. Raises SpecError for whatever `_cursor` cannot have made."""
    try:
        made_for, unknown, value, run_id = json.loads(base64.urlsafe_b64decode(cursor))
        ours = _is_place(made_for, unknown, value, run_id) and _cursor(made_for, unknown, value, run_id) == cursor
    except (ValueError, TypeError, RecursionError):
        ours = False
    if not ours:
        raise SpecError("cursor", "not a cursor that this list has answered")
    if made_for != sort:
        raise SpecError("cursor", "belongs to another list: keep the sort it came with")
    return unknown, value, run_id


def _is_place(sort: object, unknown: object, value: object, run_id: object) -> bool:
    """Whether a row may stand there: true is no 1, and a date or a number only where the sort has one."""
    if not (isinstance(sort, str) and isinstance(run_id, str) and ID.fullmatch(run_id)):
        return False
    if type(unknown) is not int or unknown not in (0, 1):
        return False
    if sort.removeprefix("-") == "created_at":
        return isinstance(value, str) and _is_moment(value)
    return isinstance(value, int | float) and not isinstance(value, bool) and _can_be_stored(value)


def _is_moment(text: str) -> bool:
    return iso(datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)) == text
