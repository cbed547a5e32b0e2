"""GET /models, /gpus, /options: the vocabulary."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any

from fastapi import APIRouter

from engine.architecture import presets, resolve_model
from engine.catalog import gpus
from engine.errors import SpecError
from engine.spec import RunSpec

DEFAULT_SEQ: int = RunSpec.model_fields["seq"].default

router = APIRouter(tags=["catalog"])


@router.get("/models")
def models() -> list[dict[str, Any]]:
    """Every model by name, with its shapes and exact parameter count at the default `seq`.

    The learned position table of gpt-tiny is as long as `seq`: `hidden` parameters a token.
    """
    return _models()


@cache
def _models() -> list[dict[str, Any]]:
    return [row for name in presets() if (row := _model(name)) is not None]


def _model(name: str) -> dict[str, Any] | None:
    try:
        shapes = resolve_model(name)
    except SpecError:
        return None  # an encoder's config: in the catalog as a fact, not a model that can be chosen
    keys = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "style", "max_positions")
    parameters = shapes.for_sequence(DEFAULT_SEQ).parameters
    return {"name": name, "parameters": parameters} | {key: getattr(shapes, key) for key in keys}


@router.get("/gpus")
def gpu_list() -> list[dict[str, Any]]:
    """Every GPU of the catalog, with the source of each figure."""
    return [asdict(card) for card in gpus().values()]


@router.get("/options")
def options() -> list[dict[str, Any]]:
    """Every RunSpec field: its default, what it accepts, and one line of explanation."""
    return _options()


@cache
def _options() -> list[dict[str, Any]]:
    schema = RunSpec.model_json_schema()
    return [
        {
            "key": key,
            "flag": f"--{key.replace('_', '-')}",
            "default": field.default,
            "description": field.description,
            "schema": {name: value for name, value in schema["properties"][key].items() if name != "description"},
        }
        for key, field in RunSpec.model_fields.items()
    ]
