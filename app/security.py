"""What guards the server from a browser's other pages and from the network: pure ASGI, outermost first in `install`.

A server on localhost is reachable by every page the user's browser shows (DNS rebinding, cross-origin forms), so the
host and the origin of a request are checked even without a token.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.problems import problem
from app.settings import Settings

COOKIE = "remat_session"
OPEN_PATHS = ("/healthz", "/login", "/static/")
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self'",
        "style-src 'self'",
        "style-src-attr 'unsafe-inline'",  # the bars' widths, and one attribute of Plotly's heat map
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "object-src 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class SecurityHeaders:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, with_headers)


class HostCheck:
    """Refuse a request addressed to a name that is not ours: a rebound DNS name is the attacker's."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self.app, self.hosts = app, frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _without_port(Headers(scope=scope).get("host", "")) not in self.hosts:
            refusal = problem(400, "this host name is not served here; add it to REMAT_ALLOWED_HOSTS")
            return await refusal(scope, receive, send)
        return await self.app(scope, receive, send)


def _without_port(host: str) -> str:
    return host.lower().partition("]")[0] + "]" if host.startswith("[") else host.lower().partition(":")[0]


class OriginCheck:
    """Refuse unsafe requests that a page of another origin makes.

    Browsers say where a request comes from (Sec-Fetch-Site, or Origin on plain HTTP); programs say nothing.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in SAFE_METHODS and not _same_origin(scope):
            return await problem(403, "the request comes from another site")(scope, receive, send)
        return await self.app(scope, receive, send)


def _same_origin(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    if headers.get("authorization", "").lower().startswith("bearer ") and "cookie" not in headers:
        return True  # a browser attaches no Bearer token by itself
    if site := headers.get("sec-fetch-site"):
        return site in ("same-origin", "none")
    origin = headers.get("origin")
    if origin is None:
        return True
    return origin != "null" and urlsplit(origin).netloc.lower() == headers.get("host", "").lower()


class TokenCheck:
    """With a token set, everything but the health check, the login and the static files needs it."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _path(scope).startswith(OPEN_PATHS) or self._knows(HTTPConnection(scope)):
            return await self.app(scope, receive, send)
        headers = {"WWW-Authenticate": "Bearer"}
        wants_html = "text/html" in Headers(scope=scope).get("accept", "")
        if wants_html and scope["method"] == "GET":
            headers["Location"] = f"{scope.get('root_path', '')}/login"
            return await problem(303, "log in first", headers=headers)(scope, receive, send)
        return await problem(401, "a token is needed: Authorization: Bearer …", headers=headers)(scope, receive, send)

    def _knows(self, connection: HTTPConnection) -> bool:
        scheme, _, given = connection.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and same_secret(given.strip(), self.token):
            return True
        return same_secret(connection.cookies.get(COOKIE, ""), session_cookie(self.token))


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def session_cookie(token: str) -> str:
    """What the cookie holds: proof of the token, not the token."""
    return hmac.new(token.encode(), b"remat session", hashlib.sha256).hexdigest()


def same_secret(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


class BodyLimit:
    """413 for a body that is too large, by its declared length or as it arrives."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        refusal = problem(413, f"the body is larger than {self.max_bytes} bytes", headers={"Connection": "close"})
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared[:20]) > self.max_bytes:
            return await refusal(scope, receive, send)
        chunks: list[Message] = []
        size = 0
        while True:
            message = await receive()
            chunks.append(message)
            size += len(message.get("body", b""))
            if size > self.max_bytes:
                return await refusal(scope, receive, send)
            if message["type"] != "http.request" or not message.get("more_body"):
                break
        chunks.reverse()

        async def replay() -> Message:
            return chunks.pop() if chunks else await receive()

        return await self.app(scope, replay, send)


def install(app: Starlette, settings: Settings) -> None:
    """Starlette runs the middleware added last first."""
    own = settings.host.lower() if settings.host not in ("0.0.0.0", "::") else "localhost"
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if settings.token is not None:
        app.add_middleware(TokenCheck, token=settings.token.get_secret_value())
    app.add_middleware(OriginCheck)
    app.add_middleware(HostCheck, hosts=(*LOOPBACK, own, *(host.lower() for host in settings.allowed_hosts)))
    app.add_middleware(SecurityHeaders)
