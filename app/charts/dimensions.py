"""The numeric fields of a RunResult that a person can plot, sort by or compare: one table for every page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from app.fields import lookup
from engine.units import GIB, KIB, MIB, format_bytes, format_count, format_seconds

Kind = Literal["bytes", "seconds", "rate", "count", "flops", "fraction"]


@dataclass(frozen=True, slots=True)
class Dimension:
    """`key` is the number's dotted path inside a result; `better` is the direction of improvement, if any."""

    key: str
    label: str
    kind: Kind
    better: Literal["lower", "higher"] | None = None

    def of(self, result: Mapping[str, Any]) -> float | None:
        """The number of a RunResult, or of what a curve needs of one; None where the method does not know it."""
        value = result["numbers"].get(self.key) if "numbers" in result else lookup(result, self.key)
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
    Dimension("memory.device_peak_bytes", "Peak memory", "bytes", "lower"),
    Dimension("timing.tokens_per_second", "Tokens per second", "rate", "higher"),
    Dimension("timing.step_seconds", "Step time", "seconds", "lower"),
    Dimension("memory.saved_activation_bytes", "Saved activations", "bytes", "lower"),
    Dimension("memory.device_reserved_bytes", "Reserved memory", "bytes", "lower"),
    Dimension("memory.host_peak_bytes", "Host memory", "bytes", "lower"),
    Dimension("memory.nvme_bytes", "NVMe", "bytes", "lower"),
    Dimension("timing.mfu", "Model FLOPs utilisation", "fraction", "higher"),
    Dimension("timing.hfu", "Hardware FLOPs utilisation", "fraction"),
    Dimension("timing.model_flops", "Model FLOPs a step", "flops"),
    Dimension("timing.hardware_flops", "Hardware FLOPs a step", "flops", "lower"),
    Dimension("parameters", "Parameters", "count"),
    Dimension("spec.micro_batch", "Micro-batch", "count"),
    Dimension("spec.seq", "Sequence length", "count"),
)
DIMENSIONS = {dimension.key: dimension for dimension in _ALL}
"""The ones that the pages offer; any other numeric field can be named in the address."""

_KINDS: dict[str, Kind] = {"bytes": "bytes", "seconds": "seconds", "flops": "flops", "mfu": "fraction"}


def dimension(key: str) -> Dimension:
    """The dimension of any dotted path to a number; its kind is told by the unit that ends the name."""
    if key in DIMENSIONS:
        return DIMENSIONS[key]
    name = key.rpartition(".")[2].replace("_", " ")
    return Dimension(key, name[0].upper() + name[1:], _KINDS.get(name.rpartition(" ")[2], "count"))


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
