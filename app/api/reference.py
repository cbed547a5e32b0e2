"""GET /api/docs: the REST API's reference, made from its OpenAPI document on the server: no script, no CDN."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from app.pages.render import page

router = APIRouter(include_in_schema=False)


@router.get("/api/docs")
def reference(request: Request) -> Response:
    return page(request, "reference.html", {"here": "/api/docs", "groups": _groups(request.app.openapi())})


def _groups(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Tag -> operations in the order of the document."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            shown = {
                "method": method.upper(),
                "path": path,
                "description": operation.get("description", ""),
                "parameters": [_parameter(each) for each in operation.get("parameters", ())],
                "body": _body(operation, document["components"]["schemas"]),
            }
            groups.setdefault(operation["tags"][0], []).append(shown)
    return groups


def _parameter(parameter: dict[str, Any]) -> dict[str, str]:
    return {
        "name": parameter["name"],
        "place": parameter["in"],
        "description": parameter.get("description") or parameter["schema"].get("description", ""),
    }


def _body(operation: dict[str, Any], schemas: dict[str, Any]) -> list[dict[str, str]]:
    """The fields of the JSON body."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return []
    schema = schemas[content["schema"]["$ref"].rpartition("/")[2]]
    required = schema.get("required", ())
    return [
        {"name": name, "place": "required" if name in required else "optional", "description": _describe(field)}
        for name, field in schema["properties"].items()
    ]


def _describe(field: dict[str, Any]) -> str:
    kind = field.get("$ref", "").rpartition("/")[2]
    return str(field.get("description") or kind)
