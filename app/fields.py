"""The fields of a RunResult by dotted path: what lists are sorted by, curves drawn over and tables exported with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from engine.result import Fits, Inference, RunResult
from engine.spec import RunSpec

_SCALARS = (int, float, bool, str)
_NESTED: tuple[type[BaseModel], ...] = (Inference, Fits)


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, set[type]]]:
    """(dotted path, scalar types) of every field that is not a list or a free-form object."""
    for name, field in model.model_fields.items():
        types = set(_flat(field.annotation))
        nested = next((t for t in types if issubclass(t, BaseModel)), None)
        if nested is not None:
            yield from _paths(nested, f"{prefix}{name}.")
        elif types & set(_SCALARS):
            yield f"{prefix}{name}", types & set(_SCALARS)


def _flat(annotation: Any) -> Iterator[type]:
    """int | None -> int, NoneType; Annotated[int, …] -> int; Literal["a"] -> str."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _flat(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for part in get_args(annotation):
            yield from _flat(part)
    elif isinstance(annotation, type):
        yield annotation
    elif origin is not None and not isinstance(origin, type):
        yield from (type(value) for value in get_args(annotation))
    elif origin is not None:
        yield origin


SPEC_TYPES: dict[str, set[type]] = dict(_paths(RunSpec))
"""Every RunSpec key and the scalar types it takes."""

OPTIONAL = frozenset(key for key, field in RunSpec.model_fields.items() if field.default is None)
"""RunSpec keys whose value may be absent: null in JSON, the word `none` in a flag, a form or an address."""


def spell(value: Any) -> str:
    """A spec value as flags, forms and addresses take it: `none`, `true`, `4`; the object of a config.json as JSON."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return json.dumps(value) if isinstance(value, dict) else str(value)


_PLAIN = {
    int: re.compile(r"[+-]?[0-9]{1,20}"),
    float: re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"),
}
"""Python's own constructors also take 1_000, digits of other scripts, nan and inf."""


def read(key: str, word: str) -> Any:
    """The word as a value of its field's type; what is not of that type stays text, for who checks it to refuse."""
    types = SPEC_TYPES[key]
    if word == "none" and key in OPTIONAL:
        return None
    if bool in types:
        return {"true": True, "false": False}.get(word, word)
    kind = next((kind for kind in (int, float) if kind in types and _PLAIN[kind].fullmatch(word)), str)
    return kind(word)


NUMBERS: tuple[str, ...] = tuple(
    path for path, types in _paths(RunResult) if types & {int, float} and bool not in types
)
"""Every numeric field of a result, `spec.seq` and `memory.device_peak_bytes` alike."""

COLUMNS: tuple[str, ...] = (
    *("id", "job_id", "created_at", "method", "outcome", "spec_hash"),
    *(f"spec.{key}" for key in RunSpec.model_fields),
    *(
        path
        for path, _ in _paths(RunResult)
        if path not in {"id", "created_at", "method", "outcome", "spec_hash"} and not path.startswith("spec.")
    ),
    *("environment.device_name", "environment.device_kind", "environment.torch", "warnings"),
)
"""The columns of a CSV or Parquet export, units in their names."""


def lookup(result: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, None where a part of it is absent."""
    value: Any = result
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """The numeric fields that this result knows."""
    found = ((path, lookup(result, path)) for path in NUMBERS)
    return {path: value for path, value in found if isinstance(value, int | float)}
