"""The head and the cross-entropy as a tape, by implementation."""

from __future__ import annotations

from functools import cache

from engine.closed_form.block import Context, norm
from engine.closed_form.tape import OUTSIDE, Op, Tape, Tensor
from engine.recipes import DTYPE_BYTES


@cache
def final_norm_tape(context: Context) -> Tape:
    """The norm after the last block."""
    tape = Tape()
    norm(tape, context, tape.input(context.stream("x", OUTSIDE)), "norm", OUTSIDE)
    return tape


@cache
def loss_tape(context: Context) -> Tape:
    """Logits, log-softmax and the mean negative log-likelihood of the targets."""
    arch = context.arch
    tape = Tape()
    hidden = tape.input(context.stream("hidden", OUTSIDE))
    targets = tape.input(Tensor("targets", (context.batch, context.seq), "int64", OUTSIDE, "B·S", differentiable=False))
    shape = (context.batch, context.seq, arch.vocab)
    weight_bytes = arch.vocab * arch.hidden * DTYPE_BYTES[context.weight]
    flops = 2 * context.rows * arch.vocab * arch.hidden
    logits = tape.add(
        Op("logits", OUTSIDE, reads=(hidden.name,), makes=(Tensor("logits", shape, context.compute, OUTSIDE, "B·S·V"),),
           saves=(hidden.name,), weights=(("head.weight", weight_bytes),), flops=flops, backward_flops=2 * flops,
           product=True, weight_bytes=weight_bytes)
    )  # fmt: skip
    held = [logits]
    if logits.dtype != "fp32":
        wide = Tensor("logits_fp32", shape, "fp32", OUTSIDE, "B·S·V")
        logits = tape.add(Op("logits.float", OUTSIDE, reads=(logits.name,), makes=(wide,)))
        held.append(logits)
    log_probabilities = Tensor("log_softmax", shape, "fp32", OUTSIDE, "B·S·V")
    tape.add(
        Op("log_softmax", OUTSIDE, reads=(logits.name,), makes=(log_probabilities,), saves=(log_probabilities.name,))
    )
    loss = Tensor("loss", (), "fp32", OUTSIDE, "1")
    total = Tensor("loss.total_weight", (), "fp32", OUTSIDE, "1", differentiable=False)
    tape.add(
        Op("nll_loss", OUTSIDE, reads=(log_probabilities.name,), makes=(loss, total),
           saves=(log_probabilities.name, targets.name, total.name))
    )  # fmt: skip
    tape.hold(*held)
    return tape
