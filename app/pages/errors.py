"""Errors as pages: a browser that would be answered a problem document outside the API sees it in words."""

from __future__ import annotations

import json
import logging
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.pages.render import page
from app.security import HEADERS

PROGRAM_PATHS = ("/api/", "/metrics", "/healthz", "/readyz")
PROBLEM = "application/problem+json"
OWN_HEADERS = ("content-type", "content-length", "cache-control")
"""What the page says itself; every other header of the problem (Retry-After, Allow, the security ones) is kept."""
BUG = {
    "status": 500,
    "title": "Something is wrong in Remat",
    "detail": "An unexpected error; the server's log has the details. Nothing that was submitted is lost.",
}
BUG_START: Message = {"headers": [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]}

logger = logging.getLogger(__name__)


class ErrorPages:
    """ASGI middleware: every problem document that leaves for a browser becomes error.html, its status unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _wants_page(scope):
            await self.app(scope, receive, send)
            return
        start: Message | None = None
        body = b""
        started = False

        async def intercept(message: Message) -> None:
            nonlocal start, body, started
            if message["type"] == "http.response.start":
                if Headers(raw=message["headers"]).get("content-type", "").startswith(PROBLEM):
                    start = message
                    return
            elif start is not None and message["type"] == "http.response.body":
                body += message.get("body", b"")
                if not message.get("more_body"):
                    await _send_page(scope, receive, send, start, json.loads(body))
                return
            started = True
            await send(message)

        try:
            await self.app(scope, receive, intercept)
        except Exception as error:
            if started:
                raise
            logger.error("unhandled error on %s %s", scope["method"], scope["path"], exc_info=error)
            await _send_page(scope, receive, send, BUG_START, BUG)


def _wants_page(scope: Scope) -> bool:
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return "text/html" in Headers(scope=scope).get("accept", "") and not path.startswith(PROGRAM_PATHS)


async def _send_page(scope: Scope, receive: Receive, send: Send, start: Message, problem: dict[str, Any]) -> None:
    errors = problem.get("errors", [])
    context = {
        "here": "",
        "status": problem["status"],
        "title": problem["title"],
        "detail": problem.get("detail", "") if len(errors) < 2 else "",  # it is the first error, and how many more
        "errors": errors if len(errors) > 1 else [],
    }
    made = page(Request(scope), "error.html", context, block="main", status=problem["status"])
    for name, value in Headers(raw=start["headers"]).items():
        if name not in OWN_HEADERS:
            made.headers[name] = value
    await made(scope, receive, send)
