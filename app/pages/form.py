"""A form or a query string to a job: what is sent to POST /api/v1/jobs, or a message beside each field at fault."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from pydantic import ValidationError
from starlette.datastructures import FormData, QueryParams

from app.api.strict_json import loads
from app.fields import OPTIONAL, spell
from engine.checkpoint_names import ACCEPTED
from engine.errors import SpecError
from engine.methods import expand_for
from engine.spec import RunSpec

Kind = Literal["choices", "switch", "integer", "number", "text"]

COMMON_POLICIES = ("none", "selective", "sqrt", "per-layer", "nested")
METHODS = ("measured", "simulated", "closed-form")
LONGEST_TEXT = 200_000  # a pasted config.json; a form is never larger

LABELS = {
    "gpu": "GPU",
    "micro_batch": "Micro-batch",
    "seq": "Sequence length",
    "grad_accumulation": "Gradient accumulation",
    "memory_limit_gib": "Memory limit (GiB)",
}

EXAMPLE: dict[str, list[str]] = {
    "model": ["gpt-tiny"],
    "micro_batch": ["4"],
    "seq": ["512"],
    "precision": ["fp32"],
    "checkpointing": ["none", "sqrt", "per-layer"],
    "attention": ["standard", "flash"],
}
"""Six runs that end in under two minutes on two CPU cores, and whose curve has a shape worth looking at."""


@dataclass(frozen=True, slots=True)
class FormField:
    """One RunSpec field as a form shows it. Several values (or a comma-separated text) make the job compare them."""

    key: str
    kind: Kind
    default: Any
    hint: str
    choices: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        if self.key in LABELS:
            return LABELS[self.key]
        words = self.key.replace("_", " ")
        return words[0].upper() + words[1:]

    @property
    def shown_default(self) -> str:
        return "" if self.default is None else spell(self.default)


@cache
def form_fields() -> dict[str, FormField]:
    """Every field of RunSpec, in its order, from the model's own schema."""
    properties = RunSpec.model_json_schema()["properties"]
    return {key: _form_field(key, schema) for key, schema in properties.items()}


def _form_field(key: str, schema: Mapping[str, Any]) -> FormField:
    hint = schema.get("description", "").replace("`", "")
    default = RunSpec.model_fields[key].default
    if key == "checkpointing":
        return FormField(key, "choices", default, f"Also accepted: {ACCEPTED}.", COMMON_POLICIES)
    if "enum" in schema:
        return FormField(key, "choices", default, hint, tuple(schema["enum"]))
    types = {schema.get("type"), *(part.get("type") for part in schema.get("anyOf", ()))}
    if "boolean" in types:
        return FormField(key, "switch", default, hint, ("true", "false"))
    kind: Kind = "integer" if "integer" in types else "number" if "number" in types else "text"
    return FormField(key, kind, default, hint)


@dataclass(slots=True)
class Draft:
    """What was typed, what it means, and what is wrong with it."""

    values: dict[str, list[str]]
    payload: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    runs: list[RunSpec] = field(default_factory=list)

    def typed(self, key: str) -> list[str]:
        return self.values.get(key, [])


def parse(source: FormData | QueryParams, *, example: bool = False) -> Draft:
    """The draft of a submitted form or a query string; with `example`, an empty one is the example."""
    values: dict[str, list[str]] = {}
    for key, value in source.multi_items():
        if isinstance(value, str) and value.strip():
            values.setdefault(key, []).append(value.strip())
    if "model" in source and "model" not in values:
        values["model"] = [""]  # cleared, which is not the same as never asked for
    if example and not any(key in form_fields() or key == "model_config" for key in values):
        values = {**EXAMPLE, **values}
    return draft(values)


def draft(values: dict[str, list[str]]) -> Draft:
    """Typed values to a payload and its runs, or to errors by field."""
    made = Draft(values)
    read = {key: _read(spec_field, values.get(key, [])) for key, spec_field in form_fields().items()}
    if values.get("model_config"):
        read["model"] = _config(values["model_config"][0], made.errors)
    elif "model" in values and not read["model"]:
        made.errors["model"] = "name a model: a preset, gpt:L,d,a[,V] or llama:L,d,a,kv,f[,V]"
    spec = {key: found[0] for key, found in read.items() if len(found) == 1 and found[0] != form_fields()[key].default}
    spec = {"model": read["model"][0] if read["model"] else form_fields()["model"].default} | spec
    vary = {key: found for key, found in read.items() if len(found) > 1}
    if "model" in vary:
        del spec["model"]
    made.payload = {"spec": spec, "vary": vary, "method": values.get("method", ["measured"])[0]}
    if name := values.get("name", [""])[0]:
        made.payload["name"] = name
    if made.payload["method"] not in METHODS:
        made.errors["method"] = f"one of {', '.join(METHODS)}"
    if timeout := values.get("timeout_seconds", [""])[0]:
        made.payload["timeout_seconds"] = _number(timeout, float)
        if (
            not isinstance(made.payload["timeout_seconds"], float)
            or not 1 <= made.payload["timeout_seconds"] <= 604_800
        ):
            made.errors["timeout_seconds"] = "a number of seconds from 1 to 604800 (a week)"
    if len(name) > 200 or not name.isprintable():
        made.errors["name"] = "at most 200 printable characters"
    if not made.errors:
        try:
            made.runs = expand_for(made.payload["method"], spec, vary)
        except (ValidationError, SpecError) as error:
            made.errors = field_errors(error)
    return made


def field_errors(error: ValidationError | SpecError) -> dict[str, str]:
    """The first message for each field at fault; a rule between two fields is told beside the first."""
    if isinstance(error, SpecError):
        return {_first(error.field): error.message}
    found: dict[str, str] = {}
    for detail in error.errors(include_url=False, include_input=False):
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, SpecError):
            found.setdefault(_first(cause.field), cause.message)
        else:
            found.setdefault(str(detail["loc"][0]) if detail["loc"] else "model", detail["msg"])
    return found


def _first(names: str) -> str:
    """`compile, offload_*` -> `compile`; `vary.seq` -> `seq`."""
    name = names.split(",")[0].removeprefix("vary.").strip()
    return name if name in form_fields() else "model"


def _read(spec_field: FormField, texts: Iterable[str]) -> list[Any]:
    """The distinct values of one field. A model's shape contains commas, so models are parted by spaces or `;`."""
    parting = r"[;\s]+" if spec_field.key == "model" else r","
    words = [word.strip() for text in texts for word in re.split(parting, text[:LONGEST_TEXT]) if word.strip()]
    convert = {"integer": int, "number": float}.get(spec_field.kind)
    if spec_field.kind == "switch":
        values: list[Any] = [{"true": True, "false": False}.get(word, word) for word in words]
    else:
        values = [_number(word, convert) if convert else word for word in words]
    if spec_field.key in OPTIONAL:
        values = [None if value == "none" else value for value in values]
    return [value for index, value in enumerate(values) if value not in values[:index]]


def _number(text: str, convert: type[int] | type[float]) -> int | float | str:
    """The number, or the text as it stands, which the spec then refuses with its own message."""
    try:
        return convert(text)
    except ValueError:
        return text


def _config(text: str, errors: dict[str, str]) -> list[Any]:
    try:
        config = loads(text[:LONGEST_TEXT])
    except json.JSONDecodeError as error:
        errors["model_config"] = f"not a JSON document ({error.msg}); paste the whole config.json, braces included"
        return []
    if not isinstance(config, dict):
        errors["model_config"] = "must be a JSON object, as in a Hugging Face config.json"
        return []
    return [config]


def query_of(spec: Mapping[str, Any], vary: Mapping[str, Iterable[Any]] | None = None, **more: str) -> dict[str, Any]:
    """The query that makes /jobs/new show this job again: what differs from the defaults, and what varies."""
    query: dict[str, Any] = {key: value for key, value in more.items() if value}
    for key, spec_field in form_fields().items():
        values = list((vary or {}).get(key, ())) or [spec.get(key, spec_field.default)]
        if values != [spec_field.default]:
            name = "model_config" if key == "model" and isinstance(values[0], dict) else key
            query[name] = [spell(value) for value in values]
    return query
