"""The final norm, and the loss from hidden states to the gradients it leaves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from engine.closed_form.block import Context, norm
from engine.closed_form.tape import OUTSIDE, Tape, Tensor
from engine.recipes import DTYPE_BYTES


@cache
def final_norm_tape(context: Context) -> Tape:
    """The norm after the last block."""
    tape = Tape()
    norm(tape, context, tape.input(context.stream("x", OUTSIDE)), "norm", OUTSIDE)
    return tape


@dataclass(frozen=True)
class Loss:
    """The fused loss takes its gradient in forward: backward needs that and nothing else."""

    grad_hidden: Tensor
    grad_head: Tensor
    scalar: Tensor
    scratch_bytes: int
    """Bytes alive at the worst moment inside it, beside these."""
    flops: int
    logits: Tensor
    """The logits of one chunk."""

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return self.grad_hidden, self.grad_head, self.scalar


@cache
def fused_loss(context: Context, chunks: int) -> Loss:
    """`engine.losses`: logits in the compute dtype, softmax in fp32, gradient in place, ⌈N/chunks⌉ rows at a time.

    The logits of a chunk are alive with their fp32 copy, then the fp32 softmax with its gradient; from the second
    chunk on, the chunk before still has its gradient. Autocast adds bf16 copies of the head and of its gradient.
    """
    arch = context.arch
    size = DTYPE_BYTES[context.compute]
    rows = -(-context.rows // chunks)
    logits = Tensor("logits", (rows, arch.vocab), context.compute, OUTSIDE, "⌈B·S/chunks⌉·V", differentiable=False)
    head = arch.vocab * arch.hidden
    softmax = logits.elements * (4 if size == 4 else 4 + size) + 12 * rows
    products = logits.bytes + rows * arch.hidden * size + (head * size if context.autocast else 0)
    scratch = max(softmax + (logits.bytes if context.rows > rows else 0), products)
    if context.autocast:
        scratch += head * size + rows * arch.hidden * size
    return Loss(
        grad_hidden=context.stream("loss.grad_hidden", OUTSIDE),
        grad_head=Tensor("loss.grad_head", (arch.vocab, arch.hidden), context.weight, OUTSIDE, "V·d"),
        scalar=Tensor("loss", (), "fp32", OUTSIDE, "1"),
        scratch_bytes=scratch,
        flops=3 * 2 * context.rows * head,
        logits=logits,
    )
