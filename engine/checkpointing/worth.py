"""What recomputing each op group of a block is worth: bytes freed, FLOPs and seconds to make them again. Torch-free.

It works on tapes (`engine.closed_form.tape`): of our decoder's blocks by formula, of any other by tracing one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.catalog import gpu as find_gpu
from engine.checkpoint_names import OP_GROUPS
from engine.closed_form.block import block_tape
from engine.closed_form.hardware import Rates, rates
from engine.closed_form.ops import context_of
from engine.closed_form.tape import Op, Tape, total_bytes
from engine.spec import RunSpec

CPU_RATES = Rates(matmul=1.7e11, attention=1.5e11, memory=2.5e10, host_link=1e10, peers=1e10)
"""Two cores of a server with AVX-512, fp32, as timed on one (EPYC, 2 threads, freed memory kept): products 150 to 200
GFLOP/s, fused attention 155, pointwise operations 13 (GELU by tanh) to 37 GB/s (softmax). Plans depend on the ratios
alone."""

REFERENCE_GPU = "a100-80gb-sxm"
"""Whose rates a plan for CUDA goes by where the spec names no GPU."""

NOTES_ADVICE = ("norms", "dropout", "qkv", "attention-out", "mlp-in", "mlp-out")
"""The course notes: recompute norm outputs, dropout masks and linear projections; keep scores and FFN intermediates."""
KORTHIKANTI_ADVICE = ("attention-core",)
"""Korthikanti et al. 2022 (arXiv 2205.05198, section 5): recompute the scores, the largest tensors and cheap."""

ENOUGH = 0.5
"""`selective` frees at least this share of what a block keeps, best value first."""


@dataclass(frozen=True, slots=True)
class Worth:
    """A set of op groups, recomputed in one block."""

    groups: tuple[str, ...]
    saved_bytes: int
    """Freed between forward and backward; negative where what it is made from is larger."""
    flops: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """What a second of recomputation buys. Infinite where the bytes come for nothing."""
        if self.saved_bytes <= 0:
            return 0.0
        return self.saved_bytes / self.seconds if self.seconds else float("inf")


def plan_rates(spec: RunSpec) -> Rates:
    """The rates a plan goes by. They follow from the spec alone, so that every method makes the same plan."""
    if spec.gpu is None and not spec.device.startswith("cuda"):
        return CPU_RATES
    return rates(find_gpu(spec.gpu or REFERENCE_GPU), spec.world_size) or CPU_RATES


def seconds_of(tape: Tape, ops: Iterable[Op], card: Rates) -> float:
    """Matrix products by their FLOPs, everything by the memory it moves."""
    return sum(op.flops / card.matmul + tape.traffic(op) / card.memory for op in ops)


def worth(tape: Tape, groups: Iterable[str], card: Rates) -> Worth:
    """Recomputing `groups` in the block of `tape`, against keeping everything."""
    chosen = frozenset(groups)
    again = tape.again(chosen)
    return Worth(
        groups=tuple(group for group in OP_GROUPS if group in chosen),
        saved_bytes=total_bytes(tape.saved.values()) - total_bytes(tape.kept(chosen).values()),
        flops=sum(op.flops for op in again),
        seconds=seconds_of(tape, again, card),
    )


def groups_in(tape: Tape) -> tuple[str, ...]:
    """The op groups that a block has, in the table's order."""
    present = {op.group for op in tape.ops}
    return tuple(group for group in OP_GROUPS if group in present)


def op_worth(spec: RunSpec) -> list[Worth]:
    """Each op group alone, most bytes a second first."""
    tape, card = block_tape(context_of(spec)), plan_rates(spec)
    alone = [worth(tape, (group,), card) for group in groups_in(tape)]
    return sorted(alone, key=lambda row: -row.bytes_per_second)


def advice(spec: RunSpec) -> dict[str, Worth]:
    """The course notes' strategy, Korthikanti's, and the derived default, by name."""
    tape, card = block_tape(context_of(spec)), plan_rates(spec)
    known = {"notes": NOTES_ADVICE, "korthikanti": KORTHIKANTI_ADVICE, "derived": best_groups(tape, card)}
    present = groups_in(tape)
    return {name: worth(tape, [g for g in groups if g in present], card) for name, groups in known.items()}


def best_groups(tape: Tape, card: Rates) -> tuple[str, ...]:
    """Groups in order of value, each measured on top of those before it, until ENOUGH of the block's bytes is free."""
    target = ENOUGH * total_bytes(tape.saved.values())
    chosen = worth(tape, (), card)
    while chosen.saved_bytes < target:
        steps = [worth(tape, (*chosen.groups, group), card) for group in groups_in(tape) if group not in chosen.groups]
        steps = [step for step in steps if step.saved_bytes > chosen.saved_bytes]
        if not steps:
            break
        start = chosen
        chosen = max(steps, key=lambda step: _value(start, step))
    return chosen.groups


def _value(before: Worth, after: Worth) -> float:
    seconds = after.seconds - before.seconds
    return (after.saved_bytes - before.saved_bytes) / seconds if seconds > 0 else float("inf")


def default_groups(spec: RunSpec) -> tuple[str, ...]:
    """What `selective` recomputes for a spec of our own decoder."""
    return best_groups(block_tape(context_of(spec)), plan_rates(spec))
