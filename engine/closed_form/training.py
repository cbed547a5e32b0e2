"""Peak memory of one training step on one device: the step is walked, the peak is the most that was ever alive."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from engine.checkpoint_names import parse_checkpointing
from engine.closed_form.block import Context, block_tape, context_of, embedding_tape
from engine.closed_form.gathering import EMBEDDING, OURS, Gathering, Wrapping, padded_bytes
from engine.closed_form.hardware import RESERVED_OVER_MAIN, Rates
from engine.closed_form.loss import embedding_backward, final_norm_tape, loss_backward, loss_forward
from engine.closed_form.residency import block_bytes, residency
from engine.closed_form.schedule import Chain, Leaf, Schedule, from_tree, nested, segments
from engine.closed_form.states import optimizer_scratch_bytes, parameter_elements, rotary_buffer_bytes
from engine.closed_form.tape import total_bytes
from engine.closed_form.walk import Backward, Meter, run_forward
from engine.offload.layout import PARCELS_AHEAD
from engine.recipes import DTYPE_BYTES, RECIPES
from engine.spec import RunSpec

if TYPE_CHECKING:
    from engine.checkpointing.budget import Profile


@dataclass(frozen=True)
class Step:
    """A walked step."""

    meter: Meter
    saved_bytes: int
    schedule: Schedule
    hosted_bytes: int
    """Activations that wait for backward in host memory."""
    gathering: Gathering | None = None
    """ZeRO-3's buffers, as the step has left them."""

    @property
    def side_pools_bytes(self) -> int:
        """What the pools of side streams keep reserved on CUDA."""
        return self.gathering.side_pools_bytes if self.gathering else 0

    @property
    def reserved_bytes(self) -> int | None:
        """What the caching allocator of a CUDA device holds for an eager ZeRO-3 step; None without ZeRO-3, where the
        allocator is better replayed (`method=simulated`)."""
        return round(RESERVED_OVER_MAIN * self.meter.main_peak) + self.side_pools_bytes if self.gathering else None


def schedule_of(spec: RunSpec) -> Schedule:
    """The checkpoint policy of a spec as a schedule: the same plan that a run makes.

    Raises UnsupportedError if no plan keeps to a budget.
    """
    # Here, since these plan on the tapes of this package.
    from engine.checkpointing.budget import plan_budget
    from engine.checkpointing.worth import plan_rates

    plan, layers = parse_checkpointing(spec.checkpointing), spec.architecture.layers
    match plan.kind:
        case "none":
            return [(Leaf(), layers)]
        case "segments":
            return segments(layers, plan.segment_length(layers))
        case "nested":
            return nested(layers)
        case "selective":
            return [(Leaf(frozenset(plan.groups or _derived_groups(context_of(spec), plan_rates(spec)))), layers)]
        case "budget":
            return from_tree(plan_budget(budget_profile(spec), plan.budget, plan_rates(spec)).tree)


def budget_profile(spec: RunSpec) -> Profile:
    """What `none` keeps of a spec of our decoder, where nothing leaves the device."""
    from engine.checkpointing.budget import Profile

    tape, layers = block_tape(context_of(spec)), spec.architecture.layers
    places = ("offload_activations", "offload_optimizer", "offload_parameters", "sharding")
    whole = walk_step(spec.model_copy(update=dict.fromkeys(("checkpointing", *places), "none"))).saved_bytes
    return Profile((tape,) * layers, whole - layers * total_bytes(tape.saved.values()))


@lru_cache(4096)
def _derived_groups(context: Context, card: Rates) -> tuple[str, ...]:
    from engine.checkpointing.worth import best_groups

    return best_groups(block_tape(context), card)


def walk_step(spec: RunSpec, wrapping: Wrapping = OURS, *, waiting: int = 0) -> Step:
    """Forward, loss, backward and optimizer step of the last micro-batch of a steady step. `wrapping` is how FSDP2 is
    applied where the spec shards by zero-3; `waiting` bytes a loss other than ours keeps until its backward is over."""
    context = context_of(spec)
    recipe, arch = RECIPES[spec.precision], context.arch
    place = residency(spec)
    gradient_bytes = parameter_elements(arch) * DTYPE_BYTES[recipe.weight]
    accumulated = spec.grad_accumulation > 1 and not place.gradients_leave
    meter = Meter()
    buffers = rotary_buffer_bytes(arch, spec.seq + spec.new_tokens, recipe.weight)
    master = 2 * place.parameters if place.gathers and wrapping.fp32 else 0  # the shards are the master copy
    meter.add("parameters", (master or place.parameters) + buffers)
    meter.add("optimizer_states", place.states - master)
    meter.add("temporaries", place.buffers)
    if accumulated:
        meter.add("gradients", int(gradient_bytes * place.gradient_share))
    meter.add("parameters", place.working_parameters)
    scattered = accumulated and place.gradient_share < 1  # whole ones are new each time, and go into shares that exist
    chain = Chain(
        block_tape(context),
        meter,
        block_bytes(arch, recipe.weight),
        accumulated=(accumulated and not scattered) or place.gradients_leave,
        gradient_share=0.0 if scattered else place.gradient_share,
        offloaded=spec.offload_activations != "none",
        parcels_ahead=PARCELS_AHEAD if spec.offload_overlap else 0,
        fetched=spec.offload_parameters != "none",
    )
    if chain.fetched:
        chain.ahead = max(0, place.working_parameters - chain.parameter_bytes)
    if place.gathers:
        chain.gathering = _gathering(spec, meter, wrapping, accumulated=accumulated)
        chain.gathering.start_forward(arch.layers)
    schedule = schedule_of(spec)
    saved = _forward(spec, context, chain, schedule, waiting)
    meter.phase = "backward"
    backward = Backward(meter, accumulated=chain.accumulated and not chain.gathering)
    loss_backward(meter, context, backward, fused=spec.fused_loss)
    meter.add("activations", -waiting)
    _backward(spec, context, chain, schedule, backward)
    meter.add("parameters", -place.working_parameters)
    meter.phase = "optimizer"
    if not place.gradients_leave:
        ranks = spec.world_size if spec.sharding != "none" else 1
        meter.blip(optimizer_scratch_bytes(arch, recipe, spec.optimizer) // ranks)
    return Step(meter, saved, schedule, chain.hosted, chain.gathering)


def _gathering(spec: RunSpec, meter: Meter, wrapping: Wrapping, *, accumulated: bool) -> Gathering:
    """The buffers of one rank of zero-3, sharded gradients of earlier micro-batches included."""
    arch, weight, ranks = spec.architecture, RECIPES[spec.precision].weight, spec.world_size
    block = padded_bytes(arch, weight, ranks, blocks=True) // arch.layers
    rest = padded_bytes(arch, weight, ranks, blocks=False)
    apart = wrapping.embedding_apart and not arch.tied
    embedding = padded_bytes(arch, weight, ranks, blocks=False, only=EMBEDDING) if apart else 0
    gathering = Gathering(meter, block, rest, ranks, accumulated, wrapping, embedding)
    gathering.scattered.adopt(meter.live["gradients"])
    return gathering


def _forward(spec: RunSpec, context: Context, chain: Chain, schedule: Schedule, waiting: int) -> int:
    """Tokens to loss; the bytes kept for backward."""
    meter = chain.meter
    before = _held_bytes(meter)
    embedding, final_norm = embedding_tape(context), final_norm_tape(context)
    token_bytes = total_bytes(embedding.inputs.values())
    meter.add("activations", token_bytes)
    meter.add("temporaries", token_bytes)  # the targets
    run_forward(meter, embedding, embedding.saved)
    chain.forward(schedule)
    run_forward(meter, final_norm, final_norm.saved)
    if chain.gathering:
        chain.gathering.end_forward()
    meter.add("activations", waiting)
    loss_forward(
        meter, context, spec.loss_chunks, fused=spec.fused_loss, accumulated=chain.accumulated and not chain.gathering
    )
    chain.drop_cache()
    return _held_bytes(meter) - before + (chain.gathering.rest if chain.gathering else 0)


def _held_bytes(meter: Meter) -> int:
    """Live bytes but parameters (and what they were gathered into, which forward frees)."""
    return meter.total - meter.live["parameters"]


def _backward(spec: RunSpec, context: Context, chain: Chain, schedule: Schedule, backward: Backward) -> None:
    """From the gradient of the final norm's output to the embedding's."""
    embedding, final_norm = embedding_tape(context), final_norm_tape(context)
    gathering, inside = chain.gathering, chain.parameter_bytes * context.arch.layers
    outside = parameter_elements(context.arch) * DTYPE_BYTES[context.weight] - inside
    if gathering:
        gathering.start_backward()
    backward.run(final_norm)
    if gathering:
        gathering.after_head(outside - gathering.embedding)
    chain.meter.add("parameters", chain.ahead)
    chain.backward(schedule, backward)
    backward.rename("x", embedding.ops[-1].makes[0].name)
    embedding_backward(chain.meter, context, backward, fused=spec.fused_loss)
    if gathering:
        gathering.finish(gathering.embedding or outside)
