"""JSON as RFC 8259 has it, and nothing that could not be stored or answered again.

Python's own parser takes NaN, duplicate keys, lone surrogates and 1e999; each of them would surface later, as a 500.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

MAX_DEPTH = 32
MAX_DIGITS = 20


def loads(text: bytes | str) -> Any:
    """Parse, or raise JSONDecodeError with a message that names the fault and never repeats the input."""
    try:
        value = json.loads(
            text,
            parse_constant=lambda name: _refuse(f"{name} is not JSON"),
            parse_float=_number,
            parse_int=_integer,
            object_pairs_hook=_without_duplicates,
        )
    except RecursionError:
        _refuse(f"nested deeper than {MAX_DEPTH} levels")
    except UnicodeDecodeError:
        _refuse("not UTF-8")
    _check(value)
    return value


def _refuse(message: str) -> NoReturn:
    raise json.JSONDecodeError(message, "", 0)


def _number(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse("a number is too large")


def _integer(text: str) -> int:
    return int(text) if len(text) <= MAX_DIGITS else _refuse("a number is too large")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else _refuse("an object has the same key twice")


def _check(root: Any) -> None:
    """Depth, and strings that are text; without recursion, since the input chooses the depth."""
    level = [root]
    for _ in range(MAX_DEPTH + 1):
        inside: list[Any] = []
        for value in level:
            if isinstance(value, str) and not is_text(value):
                _refuse("a string holds a control character or half a character")
            elif isinstance(value, dict):
                inside += [*value, *value.values()]
            elif isinstance(value, list):
                inside += value
        if not inside:
            return
        level = inside
    _refuse(f"nested deeper than {MAX_DEPTH} levels")


def is_text(value: str) -> bool:
    """No lone surrogate, and no control character but tab and line ends."""
    return not any((code < 32 and code not in (9, 10, 13)) or 0xD800 <= code <= 0xDFFF for code in map(ord, value))


class StrictRequest(Request):
    async def json(self) -> Any:
        return loads(await self.body())


class StrictRoute(APIRoute):
    """A route whose JSON body is read strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return strictly
