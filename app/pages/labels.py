"""Short names for runs and jobs, and the fields worth saying about them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from app.fields import spell
from app.pages.form import form_fields
from engine.architecture import presets, resolve_model
from engine.errors import SpecError
from engine.units import format_bytes, format_count

Spec = Mapping[str, Any]

_QUANTITIES: dict[str, Callable[[float], str]] = {
    "_bytes_per_second": lambda value: format_count(value, "B/s"),
    "_bytes": format_bytes,
}
"""A fact's quantity by the end of its name."""

MAIN = ("model", "checkpointing", "attention", "micro_batch", "seq")
"""What a label says of every run; any other field is said where it is not the default."""
FEW = 5  # fields that a label says whatever their values are

WORDS = {
    **dict.fromkeys(("checkpointing", "attention", "precision", "optimizer", "gpu", "sharding"), "{}"),
    "micro_batch": "batch {}",
    "grad_accumulation": "accumulate {}",
    **{f"offload_{what}": f"{what} on {{}}" for what in ("optimizer", "parameters", "activations")},
    "offload_overlap": "overlap {}",
    "world_size": "ranks {}",
    "device": "on {}",
    "memory_limit_gib": "limit {} GiB",
}
"""How a label says a field; by its name, unless it stands here. No two fields can be taken for one another."""


def model_name(model: str | Mapping[str, Any]) -> str:
    """A preset's own name, or what a config object calls itself, with a mark that no other config shares."""
    if isinstance(model, str):
        return model
    architectures = model.get("architectures") or [model.get("model_type", "config.json")]
    name = str(architectures[0] if isinstance(architectures, list) else architectures)[:60]
    return f"{name} #{hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()[:6]}"


def run_label(spec: Spec, vary: Iterable[str] = ()) -> str:
    """What tells this run from every other. `vary`: the fields on which the runs beside it differ, where that is known;
    of many, those beyond the main ones are said where they are not the default."""
    keys = list(vary)
    if not keys or len(keys) > FEW:
        keys = [key for key in keys or form_fields() if key in MAIN or _changed(key, spec)]
    first = [key for key in MAIN if key in keys]
    return " · ".join(_word(key, spec) for key in [*first, *(key for key in keys if key not in MAIN)])


def varying(specs: Sequence[Spec]) -> list[str]:
    """The fields on which these runs differ."""
    return [key for key in form_fields() if len({spell(_value(key, spec)) for spec in specs}) > 1]


def _value(key: str, spec: Spec) -> Any:
    return spec.get(key, form_fields()[key].default)


def _changed(key: str, spec: Spec) -> bool:
    return bool(_value(key, spec) != form_fields()[key].default)


def _word(key: str, spec: Spec) -> str:
    value = _value(key, spec)
    if key == "model":
        return model_name(value)
    named = f"{key.replace('_', ' ')} {{}}"
    unsaid = value in (None, "none") and key not in MAIN  # "none" alone would not say of what
    return (named if unsaid else WORDS.get(key, named)).format(spell(value))


def job_summary(spec: Spec, vary: Mapping[str, Any]) -> str:
    """`gpt-tiny, batch 4, seq 512, fp32: 3 checkpointing × 2 attention`."""
    told = ("model", "micro_batch", "seq")
    fixed = [_word(key, spec) for key in told if key not in vary]
    fixed += [_word(key, spec) for key in form_fields() if key not in (*told, *vary) and _changed(key, spec)]
    grid = " × ".join(f"{len(values)} {key}" for key, values in vary.items())
    return ", ".join(fixed) + (f": {grid}" if grid else "")


def differs(spec: Spec) -> dict[str, str]:
    """The fields that are not the default, as text."""
    found = {key: _value(key, spec) for key in form_fields() if _changed(key, spec)}
    return {key: model_name(value) if key == "model" else spell(value) for key, value in found.items()}


def full_spec(spec: Spec) -> list[tuple[str, str, bool]]:
    """Every field as (key, text, whether it is the default), in the order of RunSpec; the model is always told."""
    rows = []
    for key, field in form_fields().items():
        value = spec.get(key, field.default)
        rows.append((key, "–" if value is None else spell(value), value == field.default and key != "model"))
    return rows


def facts(*environments: Mapping[str, Any]) -> list[tuple[str, str]]:
    """One or several environments as (fact, text), a fact on which they differ with each of its texts; what was not
    found is left out."""
    found: dict[str, list[str]] = {}
    for environment in environments:
        for key, value in environment.items():
            name, text = _fact(key, value)
            if value is not None and text not in found.setdefault(name, []):
                found[name].append(text)
    return [(name, ", ".join(texts)) for name, texts in found.items() if texts]


def _fact(key: str, value: Any) -> tuple[str, str]:
    for suffix, text in _QUANTITIES.items():
        if key.endswith(suffix):
            return key.removesuffix(suffix).replace("_", " "), text(value)
    return key.replace("_", " "), str(value)


@cache
def usable_models() -> tuple[str, ...]:
    """Preset names that the engine can build; a catalog config of another kind is known but not offered."""
    return tuple(name for name in presets() if _resolves(name))


def _resolves(name: str) -> bool:
    try:
        resolve_model(name)
    except SpecError:
        return False
    return True
