"""The largest micro-batch and the longest sequence that fit."""

from __future__ import annotations

from collections.abc import Callable

from engine.planning.candidates import Limits, judge, varied
from engine.spec import RunSpec

LARGEST = 2**20


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest size that fits, by doubling and bisection; 0 where not even one does."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= LARGEST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_micro_batch(spec: RunSpec, there: Limits) -> int:
    """Sequences in one forward pass that still fit; 0 where not even one does."""
    return _largest(lambda size: judge(varied(spec, micro_batch=size), there).fits)


def largest_seq(spec: RunSpec, there: Limits, step: int = 128) -> int:
    """Tokens in a sequence that still fit, a multiple of `step`, within the model's own limit; 0 where none does."""
    arch = spec.architecture
    limit = arch.max_positions if arch.positions == "learned" and not arch.made_up else None

    def fits(count: int) -> bool:
        tokens = count * step
        return (limit is None or tokens <= limit) and tokens <= 2**24 and judge(varied(spec, seq=tokens), there).fits

    return _largest(fits) * step
