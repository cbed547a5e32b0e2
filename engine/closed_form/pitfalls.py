"""What a prediction should warn about, with its numbers."""

from __future__ import annotations

from engine.closed_form.block import block_tape, context_of
from engine.closed_form.loss import fused_loss
from engine.closed_form.states import parameter_elements
from engine.closed_form.walk import Meter
from engine.offload.layout import clipping_note
from engine.recipes import DTYPE_BYTES, RECIPES
from engine.spec import RunSpec
from engine.units import format_bytes


def quadratic_share(spec: RunSpec) -> float:
    """Share of one block's saved bytes that S×S tensors take."""
    saved = block_tape(context_of(spec)).saved.values()
    square = sum(tensor.bytes for tensor in saved if "S²" in tensor.formula)
    return square / sum(tensor.bytes for tensor in saved)


def half_quadratic_seq(spec: RunSpec) -> int:
    """The sequence length at which S×S tensors pass half of a block's saved bytes."""
    share = quadratic_share(spec)
    return round(spec.seq * (1 - share) / share) if share else 0


def pitfalls(spec: RunSpec, meter: Meter) -> list[str]:
    """The course's pitfalls 18 to 20 and what else deserves a line, each with the figures that say why."""
    found = []
    context = context_of(spec)
    if (share := quadratic_share(spec)) > 0.25:
        found.append(
            f"attention scores take {share:.0%} of a block's saved bytes at S={spec.seq} (they pass half at "
            f"S={half_quadratic_seq(spec)}): attention=flash does not keep them"
        )
    window = context.arch.sliding_window
    if window and spec.seq > window:
        found.append(f"the sliding window of {window} is not modelled: every score and cached key is counted")
    logits = fused_loss(context, spec.loss_chunks)
    if spec.loss_chunks == 1 and logits.scratch_bytes > meter.peak / 4:
        found.append(
            f"the logits and their softmax take {format_bytes(logits.scratch_bytes)} of the "
            f"{format_bytes(meter.peak)} peak: loss_chunks=8 makes them an eighth"
        )
    at = meter.at_peak
    states = at["parameters"] + at["gradients"] + at["optimizer_states"]
    if spec.checkpointing != "none" and states > 0.9 * meter.peak:
        found.append(
            f"parameters, gradients and optimizer states are {states / meter.peak:.0%} of the peak: checkpointing can "
            "not lower it further, a cheaper optimizer, sharding or offloading can"
        )
    if spec.max_grad_norm is not None and spec.offload_optimizer != "none" and spec.offload_overlap:
        found.append(clipping_note(parameter_elements(context.arch) * DTYPE_BYTES[RECIPES[spec.precision].weight]))
    if RECIPES[spec.precision].compute == "fp32" and spec.gpu:
        found.append("no time is predicted in fp32: the catalog holds the cards' half-precision rates only")
    if spec.compile:
        found.append("torch.compile's fusions are not modelled: memory is eager's, no time is predicted")
    return found
