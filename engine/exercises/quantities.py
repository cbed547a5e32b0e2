"""A number as a person types it: `6.7 GB`, `6.2GiB`, `6,710,886,400`, `2.19 s`, `14x`, `33 %`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["bytes", "seconds", "plain"]

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BYTES = {f"{prefix}{name}": size for prefix, size in _PREFIXES.items() for name in ("b", "byte", "bytes")}
_BYTES |= {f"{prefix}ib": 2 ** (10 * power) for power, prefix in enumerate("kmgtp", start=1)}
_SECONDS = {
    "s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0, "h": 3600.0,
}  # fmt: skip
_PLAIN = {"": 1.0, "x": 1.0, "×": 1.0, "times": 1.0, "layers": 1.0, "tokens": 1.0, "%": 0.01}


@dataclass(frozen=True, slots=True)
class Quantity:
    """`value` in bytes, seconds or plainly; `unit` as it was written, in lower case (empty if none)."""

    value: float
    kind: Kind
    unit: str


def parse_quantity(text: str) -> Quantity | None:
    """The quantity, or None where the text is not a finite number with a known unit."""
    match = re.fullmatch(r"\s*≈?\s*([-+]?[\d,_ ]*\.?\d+(?:e[-+]?\d{1,3})?)\s*([a-zµ×%]*)\s*", text.lower())
    if match is None:
        return None
    number, unit = re.sub("[,_ ]", "", match[1]), match[2]
    try:
        value = float(number)
    except ValueError:
        return None
    tables: tuple[tuple[Kind, dict[str, float]], ...] = (
        ("plain", _PLAIN),
        ("bytes", dict(_BYTES)),
        ("seconds", _SECONDS),
    )
    for kind, table in tables:
        if unit in table and math.isfinite(value * table[unit]):
            return Quantity(value * table[unit], kind, unit)
    return None
