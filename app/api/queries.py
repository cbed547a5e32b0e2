"""Query parameters that a route does not know, or that come twice, are refused: a misspelt filter would list all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel

from engine.errors import SpecError


def open_query(request: Request) -> dict[str, str]:
    """The whole query, for a route that checks the names itself. A key given several times is a choice of several."""
    query = request.query_params
    return {name: "+".join(query.getlist(name)) for name in query}


def known_query(request: Request) -> None:
    """Raises SpecError for the first parameter that the route does not declare, or that it takes once."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    if any(each.call is open_query for each in route.dependant.dependencies):
        return
    declared = dict(_parameters(route.dependant))
    for name in request.query_params:
        if name not in declared:
            accepted = f"one of {', '.join(declared)}" if declared else "none is accepted here"
            raise SpecError(name[:100], f"no such parameter: {accepted}")
        if not declared[name] and len(request.query_params.getlist(name)) > 1:
            raise SpecError(name, "given more than once")


KNOWN_QUERY = Depends(known_query)


def _parameters(dependant: Dependant) -> Iterator[tuple[str, bool]]:
    """(name, whether it may be repeated) of each query parameter; the fields of a model are parameters."""
    for parameter in dependant.query_params:
        annotation = parameter.field_info.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from ((name, _is_list(field.annotation)) for name, field in annotation.model_fields.items())
        else:
            yield parameter.alias, _is_list(annotation)
    for dependency in dependant.dependencies:
        yield from _parameters(dependency)


def _is_list(annotation: Any) -> bool:
    """`list[X]`, or it among others: `list[X] | None`."""
    return get_origin(annotation) is list or any(_is_list(part) for part in get_args(annotation))
