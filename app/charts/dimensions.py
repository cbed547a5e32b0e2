"""The numeric fields of a RunResult that a person can plot, sort by or compare: one table for every page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.units import GIB, KIB, MIB, format_bytes, format_count, format_seconds

Kind = Literal["bytes", "seconds", "rate", "count", "flops", "fraction"]


@dataclass(frozen=True, slots=True)
class Dimension:
    """`path` leads to the number inside a result dictionary; `better` is the direction of improvement, if any."""

    key: str
    label: str
    kind: Kind
    path: tuple[str, ...]
    better: Literal["lower", "higher"] | None = None

    def of(self, result: Mapping[str, Any]) -> float | None:
        """The number, or None where the method does not know it."""
        value: Any = result
        for step in self.path:
            value = value.get(step) if isinstance(value, Mapping) else None
        return value if isinstance(value, int | float) else None

    def show(self, value: float | None) -> str:
        """The number as a person reads it."""
        return FORMATS[self.kind](value)


def _plain(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


FORMATS = {
    "bytes": format_bytes,
    "seconds": format_seconds,
    "rate": _plain,
    "count": _plain,
    "flops": lambda value: format_count(value, "FLOP"),
    "fraction": _percent,
}

_ALL = (
    Dimension("device_peak_bytes", "Peak memory", "bytes", ("memory", "device_peak_bytes"), "lower"),
    Dimension("tokens_per_second", "Tokens per second", "rate", ("timing", "tokens_per_second"), "higher"),
    Dimension("step_seconds", "Step time", "seconds", ("timing", "step_seconds"), "lower"),
    Dimension("saved_activation_bytes", "Saved activations", "bytes", ("memory", "saved_activation_bytes"), "lower"),
    Dimension("device_reserved_bytes", "Reserved memory", "bytes", ("memory", "device_reserved_bytes"), "lower"),
    Dimension("host_peak_bytes", "Host memory", "bytes", ("memory", "host_peak_bytes"), "lower"),
    Dimension("mfu", "Model FLOPs utilisation", "fraction", ("timing", "mfu"), "higher"),
    Dimension("hfu", "Hardware FLOPs utilisation", "fraction", ("timing", "hfu"), "higher"),
    Dimension("model_flops", "Model FLOPs a step", "flops", ("timing", "model_flops")),
    Dimension("hardware_flops", "Hardware FLOPs a step", "flops", ("timing", "hardware_flops"), "lower"),
    Dimension("parameters", "Parameters", "count", ("parameters",)),
    Dimension("micro_batch", "Micro-batch", "count", ("spec", "micro_batch")),
    Dimension("seq", "Sequence length", "count", ("spec", "seq")),
)
DIMENSIONS = {dimension.key: dimension for dimension in _ALL}


@dataclass(frozen=True, slots=True)
class Scale:
    """Divide by `size`, write `unit` on the axis."""

    size: float
    unit: str


def axis_scale(dimension: Dimension, values: Sequence[float]) -> Scale:
    """The unit in which the largest of `values` reads as a number from 1 to 1024 (bytes) or 1000 (seconds)."""
    top = max((abs(value) for value in values), default=0)
    if dimension.kind == "bytes":
        sizes = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
        return next((Scale(size, unit) for size, unit in sizes if top >= size), Scale(1, "B"))
    if dimension.kind == "seconds":
        return Scale(1, "s") if top >= 1 else Scale(1e-3, "ms")
    if dimension.kind == "fraction":
        return Scale(0.01, "%")
    return Scale(1, "")
