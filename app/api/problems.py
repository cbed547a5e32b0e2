"""Errors as RFC 9457 problem details: for every status, on every path of the API, and never with the input in it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from sqlalchemy.exc import OperationalError
from starlette.exceptions import HTTPException

from app.errors import KeyReused, RunnerBusy, RunnerDied
from engine.errors import SpecError

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
MAX_ERRORS = 20
UNION_MEMBER = re.compile(r"str|int|float|[\w-]+\[.*")
"""What pydantic adds to a field's place for a part of its union: a type's name, or a validator with its arguments."""
Errors = Sequence[Mapping[str, str]]
"""{"field", "message"} each."""

PROBLEM_SCHEMA = {
    "description": "What went wrong.",
    "content": {
        MEDIA_TYPE: {
            "schema": {
                "type": "object",
                "required": ["type", "title", "status"],
                "properties": {
                    "type": {"type": "string"},
                    "title": {"type": "string"},
                    "status": {"type": "integer"},
                    "detail": {"type": "string"},
                    "instance": {"type": "string"},
                    "errors": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "properties": {"field": {"type": "string"}, "message": {"type": "string"}},
                        },
                    },
                },
            }
        }
    },
}


def problem(
    status: int, detail: str, *, errors: Errors = (), headers: Mapping[str, str] | None = None, instance: str = ""
) -> Response:
    """The document. ASCII-only JSON, so that nothing a message repeats can break the encoding."""
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
    }
    if instance:
        body["instance"] = instance
    if errors:
        body["errors"] = list(errors)[:MAX_ERRORS]
    return Response(json.dumps(body), status, {"Cache-Control": "no-store", **(headers or {})}, MEDIA_TYPE)


def field_errors(error: RequestValidationError | ValidationError | SpecError, prefix: str = "") -> list[dict[str, str]]:
    """{"field", "message"} for each fault; a rule of RunSpec names its own fields."""
    if isinstance(error, SpecError):
        return [{"field": prefix + error.field, "message": error.message}]
    return [_field_error(detail, prefix) for detail in error.errors()]


def _field_error(detail: Mapping[str, Any], prefix: str) -> dict[str, str]:
    cause = detail.get("ctx", {}).get("error")
    place = [str(part) for part in detail["loc"] if part not in ("body", "query", "path", "header")]
    if detail["type"] != "extra_forbidden":
        place = [part for part in place if not UNION_MEMBER.fullmatch(part)]
    if isinstance(cause, SpecError):
        return {"field": prefix + cause.field, "message": cause.message}
    if detail["type"] == "json_invalid":
        return {"field": "body", "message": f"not acceptable JSON: {cause}"}
    return {"field": prefix + ".".join(place) or "body", "message": detail["msg"]}


def _refused(request: Request, errors: list[dict[str, str]]) -> Response:
    first = errors[0] if errors else {"field": "body", "message": "not understood"}
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    detail = f"{first['field']}: {first['message']}{more}"
    return problem(422, detail, errors=errors, instance=request.url.path)


def install(app: FastAPI) -> None:
    """Every error that a request can meet becomes a problem document."""

    @app.exception_handler(RequestValidationError)
    def invalid_request(request: Request, error: RequestValidationError) -> Response:
        return _refused(request, field_errors(error))

    @app.exception_handler(ValidationError)
    def invalid_spec(request: Request, error: ValidationError) -> Response:
        return _refused(request, field_errors(error, "spec."))

    @app.exception_handler(SpecError)
    def spec_error(request: Request, error: SpecError) -> Response:
        return _refused(request, field_errors(error))

    @app.exception_handler(HTTPException)
    def http_error(request: Request, error: HTTPException) -> Response:
        return problem(error.status_code, str(error.detail), headers=error.headers, instance=request.url.path)

    @app.exception_handler(KeyReused)
    def key_reused(request: Request, error: KeyReused) -> Response:
        return _refused(request, [{"field": "Idempotency-Key", "message": str(error)}])

    @app.exception_handler(RunnerBusy)
    def runner_busy(request: Request, error: RunnerBusy) -> Response:
        return problem(503, str(error), headers={"Retry-After": "5"}, instance=request.url.path)

    @app.exception_handler(RunnerDied)
    def runner_died(request: Request, error: RunnerDied) -> Response:
        return problem(502, str(error), instance=request.url.path)

    @app.exception_handler(OperationalError)
    def database_error(request: Request, error: OperationalError) -> Response:
        logger.warning("database: %s", error.orig)
        return problem(
            503,
            f"the database cannot serve this now: {error.orig}",
            headers={"Retry-After": "5"},
            instance=request.url.path,
        )

    @app.exception_handler(Exception)
    def bug(request: Request, error: Exception) -> Response:
        logger.error("unhandled error on %s %s", request.method, request.url.path, exc_info=error)
        return problem(500, "an unexpected error; the server's log has the details", instance=request.url.path)
