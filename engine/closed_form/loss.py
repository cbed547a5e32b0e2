"""The final norm, and the loss from hidden states to the gradients it leaves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from engine.closed_form.block import embedding_tape
from engine.closed_form.ops import Context, linear, norm
from engine.closed_form.tape import OUTSIDE, Op, Tape, Tensor
from engine.closed_form.walk import Backward, Meter, run_forward
from engine.recipes import DTYPE_BYTES


@lru_cache(1024)
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


@lru_cache(1024)
def fused_loss(context: Context, chunks: int) -> Loss:
    """`engine.losses`: logits in the compute dtype, softmax in fp32, gradient in place, ⌈N/chunks⌉ rows at a time.

    The logits of a chunk are alive with their fp32 copy, then the fp32 softmax with its gradient. Autocast adds bf16
    copies of the head and of its gradient.
    """
    arch = context.arch
    size = DTYPE_BYTES[context.compute]
    rows = -(-context.rows // chunks)
    logits = Tensor("logits", (rows, arch.vocab), context.compute, OUTSIDE, "⌈B·S/chunks⌉·V", differentiable=False)
    head = arch.vocab * arch.hidden
    softmax = logits.elements * (4 if size == 4 else 4 + size) + 12 * rows
    products = logits.bytes + rows * arch.hidden * size + (head * size if context.autocast else 0)
    scratch = max(softmax, products)
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


@lru_cache(1024)
def standard_loss_tape(context: Context) -> Tape:
    """Logits, their fp32 copy, log-softmax and the mean negative log-likelihood, as transformers does it: 4 bytes a
    logit stay until backward, which holds 12 at once (10 and 12 in a 2-byte dtype)."""
    arch = context.arch
    tape = Tape()
    hidden = tape.input(context.stream("hidden", OUTSIDE))
    targets = tape.input(Tensor("targets", (context.batch, context.seq), "int64", OUTSIDE, "B·S", differentiable=False))
    shape = (context.batch, context.seq, arch.vocab)
    logits = linear(tape, context, hidden, "logits", arch.vocab, OUTSIDE, bias=False, formula="B·S·V")
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


def loss_forward(meter: Meter, context: Context, chunks: int, *, fused: bool, accumulated: bool) -> None:
    """Hidden states (alive) to the loss; the targets are alive when it starts."""
    targets = 8 * context.rows
    if not fused:
        tape = standard_loss_tape(context)
        meter.move(targets, "temporaries", "activations")
        run_forward(meter, tape, tape.saved)
        if "hidden" not in tape.saved:  # autocast saved a bf16 copy instead
            meter.add("activations", -tape.inputs["hidden"].bytes)
        return
    loss = fused_loss(context, chunks)
    meter.add("activations", loss.grad_hidden.bytes + loss.scalar.bytes)
    meter.add("activations" if accumulated else "gradients", loss.grad_head.bytes)
    meter.blip(loss.scratch_bytes)
    meter.add("temporaries", -targets)
    meter.add("activations", -loss.grad_hidden.bytes)  # the hidden states, which are as large, die here


def loss_backward(meter: Meter, context: Context, backward: Backward, *, fused: bool) -> None:
    """Leaves the gradient of the final norm's output flowing, and a tied head's gradient waiting."""
    if not fused:
        backward.seed("loss", 4)
        meter.add("temporaries", 4)
        backward.run(standard_loss_tape(context), tied_head=context.arch.tied)
        backward.rename("hidden", "norm")
        return
    loss = fused_loss(context, 1)
    meter.move(loss.grad_hidden.bytes, "activations", "temporaries")
    if backward.accumulated and not context.arch.tied:
        meter.add("activations", -loss.grad_head.bytes)
    backward.seed("norm", loss.grad_hidden.bytes)


def embedding_backward(meter: Meter, context: Context, backward: Backward, *, fused: bool) -> None:
    """The embedding's gradient; a tied head's, which waited for it, is added to it in place and dies."""
    waiting = context.arch.vocab * context.arch.hidden * DTYPE_BYTES[context.weight] if context.arch.tied else 0
    born = "gradients" if not backward.accumulated else "activations" if fused else "temporaries"
    meter.move(waiting, born, "temporaries")
    backward.run(embedding_tape(context))
    meter.add("temporaries", -waiting)
