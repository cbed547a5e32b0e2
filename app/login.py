"""The login form: the token once, then a cookie that only proves it."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from app.security import COOKIE, same_secret, session_cookie
from app.services import Needs

router = APIRouter(include_in_schema=False)

REFUSAL_SECONDS = 1.0  # what a wrong guess costs
FORM = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Log in · Remat</title><link rel="stylesheet" href="{root}/static/app.css"></head>
<body><main id="main"><h1>Log in</h1>{message}
<form method="post" action="{root}/login"><label for="token">Token (REMAT_TOKEN of the server)</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<button type="submit">Log in</button></form></main></body></html>"""


def _form(request: Request, message: str = "", status: int = 200) -> Response:
    root = request.scope.get("root_path", "")
    return HTMLResponse(FORM.format(root=root, message=message), status, {"Cache-Control": "no-store"})


@router.get("/login")
async def login_form(request: Request) -> Response:
    return _form(request)


@router.post("/login")
async def login(request: Request, needs: Needs, token: Annotated[str, Form(max_length=1000)]) -> Response:
    """Trade the token for the session cookie."""
    expected = needs.settings.token
    if expected is not None and not same_secret(token, expected.get_secret_value()):
        await asyncio.sleep(REFUSAL_SECONDS)
        return _form(request, '<p role="alert">This is not the token.</p>', 403)
    root = request.scope.get("root_path", "")
    response = RedirectResponse(f"{root}/", 303)
    if expected is not None:
        value = session_cookie(expected.get_secret_value())
        secure = request.url.scheme == "https"
        response.set_cookie(COOKIE, value, httponly=True, samesite="strict", secure=secure, path=f"{root}/")
    return response
