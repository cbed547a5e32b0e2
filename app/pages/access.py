"""What a page needs of the application: its database, its settings, the prefix a proxy adds."""

from __future__ import annotations

from starlette.requests import Request

from app.db.session import Database
from app.services import services
from app.settings import Settings


def database(request: Request) -> Database:
    return services(request).database


def settings(request: Request) -> Settings:
    return services(request).settings


def prefix(request: Request) -> str:
    """The path under which a reverse proxy serves Remat, without its final slash."""
    return str(request.scope.get("root_path", "")).rstrip("/")
