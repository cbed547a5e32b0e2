"""Versions, devices, catalogs, and what the numbers mean."""

from __future__ import annotations

import json
import platform
import sqlite3
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.api.catalog import DEFAULT_SEQ
from app.db import runs
from app.pages.access import database, prefix
from app.pages.labels import facts, usable_models
from app.pages.render import page
from app.settings import static_directory
from engine.architecture import Architecture, resolve_model
from engine.catalog import gpus

router = APIRouter(include_in_schema=False)

PACKAGES = ("remat", "torch", "transformers", "fastapi", "uvicorn", "sqlalchemy", "pydantic")


@router.get("/about")
def about(request: Request) -> Response:
    with database(request).read() as session:
        latest = runs.page(session, runs.Filters(method=["measured"]), limit=1).items
    context = {
        "here": "/about",
        "versions": [*_versions(), ("SQLite", sqlite3.sqlite_version), ("Python", platform.python_version())],
        "device": facts(latest[0]["environment"]) if latest else [],
        "cards": list(gpus().values()),
        "models": _architectures(),
        "vendored": vendored(),
        "machine_form": prefix(request) + "/api/v1/options",
    }
    return page(request, "about.html", context)


@cache
def _versions() -> list[tuple[str, str]]:
    """Installed versions, read from metadata: nothing is imported for it."""
    return [(name, _version(name)) for name in PACKAGES]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


@cache
def _architectures() -> list[Architecture]:
    """Every model at the default sequence: a learned position table that grows has grown to it."""
    return [resolve_model(name).for_sequence(DEFAULT_SEQ) for name in usable_models()]


@cache
def vendored() -> list[dict[str, Any]]:
    """The browser libraries that are served, from their manifest."""
    found: list[dict[str, Any]] = json.loads((static_directory() / "vendor" / "manifest.json").read_text())
    return found
