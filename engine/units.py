"""Units and the one formatter through which every quantity shown to a person goes."""

from __future__ import annotations

import math

KIB = 2**10
MIB = 2**20
GIB = 2**30
GB = 10**9

_BINARY = ((2**40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_DECIMAL = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


def format_bytes(count: float | None) -> str:
    """1536 -> '1.50 KiB'; None (unknown) -> '–'."""
    if count is None:
        return "–"
    for size, name in _BINARY:
        if abs(count) >= size:
            return f"{count / size:.2f} {name}"
    return f"{count:.0f} B"


def format_seconds(seconds: float | None) -> str:
    """0.0123 -> '12.3 ms'; 75 -> '1 min 15 s'; None (unknown) -> '–'."""
    if seconds is None:
        return "–"
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
    if seconds >= 60:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} µs"


def format_count(count: float | None, unit: str = "") -> str:
    """8030261248 -> '8.03 G'; None (unknown) -> '–'."""
    if count is None or not math.isfinite(count):
        return "–"
    for size, prefix in _DECIMAL:
        if abs(count) >= size:
            return f"{count / size:.2f} {prefix}{unit}"
    return f"{count:.4g} {unit}".rstrip()
