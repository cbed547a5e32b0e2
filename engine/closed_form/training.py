"""Peak memory of one training step on one device: the step is walked, the peak is the most that was ever alive."""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint_names import parse_checkpointing
from engine.closed_form.block import Context, block_tape, context_of, embedding_tape
from engine.closed_form.budget import REFERENCE_CARD, budget_schedule
from engine.closed_form.loss import embedding_backward, final_norm_tape, loss_backward, loss_forward
from engine.closed_form.residency import block_bytes, residency
from engine.closed_form.schedule import Chain, Leaf, Schedule, nested, segments
from engine.closed_form.states import optimizer_peak_bytes, parameter_elements, rotary_buffer_bytes
from engine.closed_form.tape import total_bytes
from engine.closed_form.walk import Backward, Meter, run_forward
from engine.recipes import DTYPE_BYTES, RECIPES
from engine.spec import RunSpec

DEFAULT_SELECTIVE = ("norms", "attention-core", "mlp-activation")
"""What `selective` recomputes: large tensors that cost few FLOPs to make again."""


@dataclass(frozen=True)
class Step:
    """A walked step."""

    meter: Meter
    saved_bytes: int
    schedule: Schedule
    hosted_bytes: int
    """Activations that wait for backward in host memory."""


def schedule_of(spec: RunSpec) -> Schedule:
    """The checkpoint policy of a spec as a schedule."""
    plan, layers = parse_checkpointing(spec.checkpointing), spec.architecture.layers
    if plan.kind == "none":
        return [(Leaf(), layers)]
    if plan.kind == "segments":
        return segments(layers, plan.segment_length(layers))
    if plan.kind == "nested":
        return nested(layers)
    if plan.kind == "selective":
        return [(Leaf(frozenset(plan.groups or DEFAULT_SELECTIVE)), layers)]
    context = context_of(spec)
    card = spec.gpu or REFERENCE_CARD
    block = total_bytes(block_tape(context).saved.values())
    around = walk_step(spec.model_copy(update={"checkpointing": "none"})).saved_bytes - layers * block
    allowed = int(plan.budget * (around + layers * block)) - around
    return budget_schedule(context, layers, allowed, card)


def walk_step(spec: RunSpec) -> Step:
    """Forward, loss, backward and optimizer step of the last micro-batch of a steady step."""
    context = context_of(spec)
    recipe, arch = RECIPES[spec.precision], context.arch
    place = residency(spec)
    gradient_bytes = parameter_elements(arch) * DTYPE_BYTES[recipe.weight]
    accumulated = spec.grad_accumulation > 1 and not place.gradients_leave
    meter = Meter()
    buffers = rotary_buffer_bytes(arch, spec.seq + spec.new_tokens, recipe.weight)
    meter.add("parameters", place.parameters + buffers)
    meter.add("optimizer_states", place.states)
    if accumulated:
        meter.add("gradients", int(gradient_bytes * place.gradient_share))
    meter.add("parameters", place.working_parameters)
    chain = Chain(
        block_tape(context),
        meter,
        block_bytes(arch, recipe.weight),
        accumulated=accumulated or place.gradients_leave,
        gradient_share=place.gradient_share,
        offloaded=spec.offload_activations != "none",
    )
    schedule = schedule_of(spec)
    saved = _forward(spec, context, chain, schedule)
    meter.phase = "backward"
    _backward(spec, context, chain, schedule, Backward(meter, accumulated=chain.accumulated))
    meter.add("parameters", -place.working_parameters)
    meter.phase = "optimizer"
    if not place.gradients_leave:
        ranks = spec.world_size if spec.sharding != "none" else 1
        worst = optimizer_peak_bytes(arch, recipe, spec.optimizer) - gradient_bytes
        meter.blip(worst // ranks)
    return Step(meter, saved, schedule, chain.hosted)


def _forward(spec: RunSpec, context: Context, chain: Chain, schedule: Schedule) -> int:
    """Tokens to loss; the bytes kept for backward."""
    meter = chain.meter
    before = meter.total
    embedding, final_norm = embedding_tape(context), final_norm_tape(context)
    token_bytes = total_bytes(embedding.inputs.values())
    meter.add("activations", token_bytes)
    meter.add("temporaries", token_bytes)  # the targets
    run_forward(meter, embedding, embedding.saved)
    chain.forward(schedule)
    run_forward(meter, final_norm, final_norm.saved)
    loss_forward(meter, context, spec.loss_chunks, fused=spec.fused_loss, accumulated=chain.accumulated)
    chain.drop_cache()
    return meter.total - before


def _backward(spec: RunSpec, context: Context, chain: Chain, schedule: Schedule, backward: Backward) -> None:
    embedding, final_norm = embedding_tape(context), final_norm_tape(context)
    loss_backward(chain.meter, context, backward, fused=spec.fused_loss)
    backward.run(final_norm)
    chain.backward(schedule, backward)
    backward.rename("x", embedding.ops[-1].makes[0].name)
    embedding_backward(chain.meter, context, backward, fused=spec.fused_loss)
