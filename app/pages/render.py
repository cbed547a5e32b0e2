"""Templates: where they stand, what they can call, and how a page or a piece of it is answered."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from typing import Any
from urllib.parse import urlencode

from jinja2 import pass_context
from jinja2.runtime import Context
from jinja2_fragments.fastapi import Jinja2Blocks
from starlette.requests import Request
from starlette.responses import Response

from app.charts.dimensions import DIMENSIONS
from app.charts.figure import CATEGORIES, METHOD_LABELS
from app.fields import spell
from app.pages.views import signed_percent
from app.settings import static_directory, templates_directory
from engine.units import format_bytes, format_count, format_seconds

NAVIGATION = (
    ("/", "Overview"),
    ("/explore", "Explore"),
    ("/runs", "Runs"),
    ("/jobs", "Jobs"),
    ("/learn", "Learn"),
    ("/exercises", "Exercises"),
    ("/accuracy", "Accuracy"),
    ("/about", "About"),
)


@cache
def _fingerprint(path: str) -> str:
    return hashlib.sha256((static_directory() / path).read_bytes()).hexdigest()[:10]


def _prefix(context: Context) -> str:
    return str(context["request"].scope.get("root_path", "")).rstrip("/")


@pass_context
def static(context: Context, path: str) -> str:
    """A static file's address, with its content's fingerprint so that it can be cached for ever."""
    return f"{_prefix(context)}/static/{path}?v={_fingerprint(path)}"


@pass_context
def url(context: Context, path: str, query: Mapping[str, Any] | None = None, **more: Any) -> str:
    """A page's address under whatever prefix a proxy adds; empty query values are left out."""
    return _prefix(context) + address(path, {**(query or {}), **more})


def address(path: str, query: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in query.items() if value not in (None, "", [], ())}
    return f"{path}?{urlencode(kept, doseq=True)}" if kept else path


def moment(value: datetime | str | None) -> str:
    """A time as `2026-11-29 16:53:07 UTC`."""
    if value is None:
        return "–"
    when = datetime.fromisoformat(value) if isinstance(value, str) else value
    when = when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"


@cache
def templates() -> Jinja2Blocks:
    made = Jinja2Blocks(directory=templates_directory())
    made.env.trim_blocks = made.env.lstrip_blocks = True
    made.env.filters.update(
        bytes=format_bytes,
        seconds=format_seconds,
        count=format_count,
        moment=moment,
        spec_value=spell,
        signed=signed_percent,
    )
    made.env.globals.update(
        version=version("remat"),
        static=static,
        url=url,
        navigation=NAVIGATION,
        categories=CATEGORIES,
        method_labels=METHOD_LABELS,
        dimensions=DIMENSIONS,
    )
    return made


def page(
    request: Request, name: str, context: Mapping[str, Any], *, block: str | None = None, status: int = 200
) -> Response:
    """The whole page, or only `block` of it when htmx asks: one address, so caches must tell the two apart."""
    partial = block if request.headers.get("hx-request") == "true" else None
    response = templates().TemplateResponse(request, name, dict(context), status_code=status, block_name=partial)
    response.headers["Vary"] = "HX-Request"
    response.headers["Cache-Control"] = "no-store"
    return response
