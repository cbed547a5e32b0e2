"""Simulated answers by spec and code version: the SQL of the predictions table."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import Session

import engine
from app.db.models import Prediction, now


@cache
def code_version() -> str:
    """A hash of the engine's sources: an answer of other code is not an answer."""
    folder = Path(engine.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def find(session: Session, spec_hash: str, method: str) -> tuple[dict[str, Any], dict[str, Any] | None] | None:
    """(result, timeline) of this spec under the present code."""
    found = session.get(Prediction, (spec_hash, method, code_version()))
    return None if found is None else (found.result, found.timeline)


def keep(session: Session, result: dict[str, Any], timeline: dict[str, Any] | None) -> None:
    session.execute(
        insert(Prediction)
        .values(
            spec_hash=result["spec_hash"],
            method=result["method"],
            code_version=code_version(),
            result=result,
            timeline=timeline,
            created_at=now(),
        )
        .on_conflict_do_nothing()
    )
