"""Short names for runs and jobs, and the fields worth saying about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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

UNITS = {"micro_batch": "batch {}", "seq": "seq {}"}


def model_name(model: str | Mapping[str, Any]) -> str:
    """A preset's own name, or what a config object calls itself."""
    if isinstance(model, str):
        return model
    architectures = model.get("architectures") or [model.get("model_type", "config.json")]
    return str(architectures[0] if isinstance(architectures, list) else architectures)[:60]


def run_label(spec: Spec, vary: Iterable[str] = ()) -> str:
    """What tells this run from the others: the fields that vary, or the main ones."""
    keys = list(vary) or ["model", "checkpointing", "attention", "micro_batch", "seq"]
    return " · ".join(_word(key, spec) for key in keys)


def _word(key: str, spec: Spec) -> str:
    value = spec.get(key, form_fields()[key].default)
    if key == "model":
        return model_name(value)
    named = key in ("checkpointing", "attention", "precision", "optimizer", "gpu")
    return spell(value) if named else UNITS.get(key, f"{key} {{}}").format(spell(value))


def job_summary(spec: Spec, vary: Mapping[str, Any]) -> str:
    """`gpt-tiny, batch 4, seq 512: 3 checkpointing × 2 attention`."""
    fixed = [_word(key, spec) for key in ("model", "micro_batch", "seq") if key not in vary]
    grid = " × ".join(f"{len(values)} {key}" for key, values in vary.items())
    return ", ".join(fixed) + (f": {grid}" if grid else "")


def differs(spec: Spec) -> dict[str, str]:
    """The fields that are not the default, as text."""
    fields = form_fields().items()
    found = {
        key: spec.get(key, field.default) for key, field in fields if spec.get(key, field.default) != field.default
    }
    return {key: model_name(value) if key == "model" else spell(value) for key, value in found.items()}


def full_spec(spec: Spec) -> list[tuple[str, str, bool]]:
    """Every field as (key, text, whether it is the default), in the order of RunSpec; the model is always told."""
    rows = []
    for key, field in form_fields().items():
        value = spec.get(key, field.default)
        rows.append((key, "–" if value is None else spell(value), value == field.default and key != "model"))
    return rows


def facts(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """An environment as (fact, text); what was not found is left out."""
    return [_fact(key, value) for key, value in environment.items() if value is not None]


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
