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


def masked_window_bytes(spec: RunSpec) -> int:
    """What transformers' SDPA path keeps for backward more where a window is shorter than the sequence: in each sliding
    layer the mask, in the compute dtype, and keys and values copied to every head, as a mask rules out grouped ones.
    Nothing more where the scores are materialised, as they are asked to be or as sinks and soft caps need."""
    context = context_of(spec)
    arch, batch, seq = context.arch, context.batch, context.seq
    if spec.attention != "flash" or arch.sinks or arch.model_type == "gemma2":
        return 0
    copies = 2 * batch * seq * (arch.heads - arch.kv_heads) * arch.head_dim
    return arch.sliding_layers * (batch * seq**2 + copies) * DTYPE_BYTES[context.compute]


def window_notes(spec: RunSpec) -> list[str]:
    """What a sliding window that is shorter than the sequence changes, and what of it is not counted."""
    arch, training = spec.architecture, spec.mode == "train"
    window = arch.sliding_window
    if not window or spec.seq + spec.new_tokens <= window:
        return []
    if not arch.runs_transformers:
        kept = "every score is counted" if training else "every position is cached and counted"
        return [f"the sliding window of {window} is ignored: Remat's decoder attends to everything, and {kept}"]
    where = f"the sliding window of {window} in {arch.sliding_layers} of {arch.layers} layers"
    if not training:
        return [f"{where} bounds their KV cache; scores and FLOPs are counted whole"]
    extra = masked_window_bytes(spec)
    more = f"; transformers keeps it as a mask, {format_bytes(extra)} more without checkpointing" if extra else ""
    return [f"{where} saves no score: whole squares are computed and masked, and so counted{more}"]


def pitfalls(spec: RunSpec, meter: Meter) -> list[str]:
    """The course's pitfalls 18 to 20 and what else deserves a line, each with the figures that say why."""
    found = []
    context = context_of(spec)
    if (share := quadratic_share(spec)) > 0.25:
        found.append(
            f"attention scores take {share:.0%} of a block's saved bytes at S={spec.seq} (they pass half at "
            f"S={half_quadratic_seq(spec)}): attention=flash does not keep them"
        )
    found += window_notes(spec)
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
