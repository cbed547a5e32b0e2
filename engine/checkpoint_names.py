"""The grammar of `checkpointing`: names to a torch-free description that the engine, closed form and pages share."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from engine.errors import SpecError

Kind = Literal["none", "segments", "selective", "nested", "budget"]

OP_GROUPS: dict[str, str] = {
    "norms": "LayerNorm / RMSNorm outputs and statistics",
    "qkv": "the query, key and value projections (and rotary embedding)",
    "attention-core": "scores, softmax and their product with the values (or the fused kernel)",
    "attention-out": "the attention output projection",
    "mlp-in": "the projection(s) from hidden to FFN width",
    "mlp-activation": "GELU, or SiLU and the gate product",
    "mlp-out": "the projection from FFN width back to hidden",
    "dropout": "dropout masks and outputs, replayed from the saved RNG state",
}

ACCEPTED = (
    "none, per-layer, sqrt, every-K (1 ≤ K ≤ 999999), selective[:GROUP+GROUP], "
    "nested, budget-F (0 < F < 1, six decimals)"
)


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """A parsed policy name. `every` is the segment length (0 = √L), `groups` what `selective` recomputes
    (None = the derived default), `budget` the fraction F."""

    kind: Kind
    every: int = 0
    groups: tuple[str, ...] | None = None
    budget: float = 1.0

    def segment_length(self, layers: int) -> int:
        """Blocks in one checkpointed segment; the course's √L, rounded, for `sqrt`."""
        return min(self.every or max(1, round(math.sqrt(layers))), layers)


@cache
def parse_checkpointing(name: str) -> Checkpointing:
    """`every-4` -> Checkpointing('segments', every=4). Raises SpecError with the accepted forms."""
    fixed = {
        "none": Checkpointing("none"),
        "per-layer": Checkpointing("segments", every=1),
        "sqrt": Checkpointing("segments", every=0),
        "selective": Checkpointing("selective"),
        "nested": Checkpointing("nested"),
    }
    if name in fixed:
        return fixed[name]
    if (match := re.fullmatch(r"every-([0-9]{1,6})", name)) and int(match[1]) >= 1:
        return Checkpointing("segments", every=int(match[1]))
    if match := re.fullmatch(r"selective:(.+)", name):
        groups = tuple(dict.fromkeys(match[1].split("+")))
        if unknown := [group for group in groups if group not in OP_GROUPS]:
            raise SpecError("checkpointing", f"unknown op group {unknown[0]!r}; groups: {', '.join(OP_GROUPS)}")
        return Checkpointing("selective", groups=groups)
    if (match := re.fullmatch(r"budget-(0?\.[0-9]{1,6})", name)) and 0 < float(match[1]) < 1:
        return Checkpointing("budget", budget=float(match[1]))
    raise SpecError("checkpointing", f"{name[:80]!r} is not accepted; use {ACCEPTED}")
