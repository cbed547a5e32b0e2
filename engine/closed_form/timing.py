"""FLOPs of a step, and its seconds on a card by the roofline: each kernel takes the longer of its arithmetic and its
memory traffic at achieved rates (`engine.closed_form.hardware`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from engine.catalog import gpu
from engine.closed_form.block import Context, block_tape, context_of, embedding_tape
from engine.closed_form.hardware import (
    HOST_BYTES_PER_SECOND,
    KERNEL_SECONDS,
    NODE_GPUS,
    NODE_HOST_BYTES_PER_SECOND,
    NVME_READ_BYTES_PER_SECOND,
    NVME_WRITE_BYTES_PER_SECOND,
    Rates,
    rates,
)
from engine.closed_form.loss import final_norm_tape, fused_loss
from engine.closed_form.residency import block_bytes, residency
from engine.closed_form.schedule import Node, Schedule, Segment
from engine.closed_form.states import optimizer_state_bytes, parameter_elements
from engine.closed_form.tape import Op, Tape, total_bytes
from engine.recipes import DTYPE_BYTES, RECIPES
from engine.result import PhaseSeconds, Timing
from engine.spec import RunSpec

HOST_ADAM_BYTES = 28
"""Bytes that a CPU AdamW reads and writes a parameter: weight, gradient and two moments in fp32, three written back."""

CLIPPING_PASSES = 3
"""Over the gradients: read for their norm, read and written when they are scaled."""


@dataclass(frozen=True)
class Work:
    """FLOPs (as MFU counts them) and, where a card is named, seconds."""

    flops: int = 0
    seconds: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.seconds + other.seconds)

    def __mul__(self, times: int) -> Work:
        return Work(self.flops * times, self.seconds * times)


def _kernel(flops: int, traffic: int, card: Rates | None, *, attention: bool, causal: bool) -> Work:
    if card is None:
        return Work(flops)
    arithmetic = flops * (0.5 if causal else 1.0) / (card.attention if attention else card.matmul)
    return Work(flops, max(arithmetic, traffic / card.memory, KERNEL_SECONDS))


def forward_work(tape: Tape, ops: Iterable[Op], card: Rates | None) -> Work:
    """Running `ops` of a tape once."""
    total = Work()
    for op in ops:
        total += _kernel(op.flops, tape.traffic(op) + 2 * op.scratch, card, attention=op.causal, causal=op.causal)
    return total


def backward_work(tape: Tape, card: Rates | None) -> Work:
    """Backward of every op: it reads gradients and what was saved, and writes the gradients of what was read."""
    total = Work()
    for op in tape.ops:
        if op.passes and not op.flops:
            continue
        traffic = tape.traffic(op) + sum(tape.tensors[name].bytes for name in op.saves) + 2 * op.backward_scratch
        total += _kernel(op.backward_flops, traffic, card, attention=op.causal, causal=op.causal)
    return total


def again_work(tape: Tape, schedule: Schedule, card: Rates | None) -> Work:
    """What a checkpoint policy runs once more in backward."""
    early = forward_work(tape, tape.ops[: tape.last_saving_op + 1], card)
    full = forward_work(tape, tape.ops, card)
    groups: dict[frozenset[str], Work] = {}

    def inside(node: Segment) -> Work:
        total = full * (node.layers - 1) + early
        for child, count in node.inside:
            total += again(child) * count
        return total

    def again(node: Node) -> Work:
        if isinstance(node, Segment):
            return inside(node)
        if node.recomputed not in groups:
            groups[node.recomputed] = forward_work(tape, tape.again(node.recomputed), card)
        return groups[node.recomputed]

    total = Work()
    for node, count in schedule:
        total += again(node) * count
    return total


@dataclass(frozen=True)
class StepWork:
    """One micro-batch by phase."""

    forward: Work
    backward: Work
    again: Work
    model_flops: int


def step_work(spec: RunSpec, schedule: Schedule, card: Rates | None) -> StepWork:
    """Forward (the loss included), backward and recomputation of one micro-batch."""
    context = context_of(spec)
    forward, backward = _once(context, card)
    forward += _loss_work(context, spec.loss_chunks, card)
    block = block_tape(context)
    products = sum(op.flops for op in block.ops) * context.arch.layers
    again = again_work(block, schedule, card)
    return StepWork(forward, backward, again, 3 * products + fused_loss(context, 1).flops)


@lru_cache(4096)
def _once(context: Context, card: Rates | None) -> tuple[Work, Work]:
    """Forward and backward of everything but the loss."""
    block, layers = block_tape(context), context.arch.layers
    forward, backward = forward_work(block, block.ops, card) * layers, backward_work(block, card) * layers
    for tape in (embedding_tape(context), final_norm_tape(context)):
        forward += forward_work(tape, tape.ops, card)
        backward += backward_work(tape, card)
    return forward, backward


def _loss_work(context: Context, chunks: int, card: Rates | None) -> Work:
    """Logits, softmax and both gradients: three products, and five passes over fp32 logits."""
    loss = fused_loss(context, chunks)
    logits = context.rows * context.arch.vocab
    work = _kernel(loss.flops, 3 * logits * DTYPE_BYTES[context.compute], card, attention=False, causal=False)
    return work + _kernel(0, 5 * 4 * logits, card, attention=False, causal=False)


def _optimizer_seconds(spec: RunSpec, card: Rates) -> float:
    """On the device: weights and states are read and written once, gradients read once, and for clipping read twice
    more and written once; host ones are transfers."""
    if spec.offload_optimizer != "none":
        return 0.0
    recipe, ranks = RECIPES[spec.precision], spec.world_size if spec.sharding != "none" else 1
    weights = parameter_elements(spec.architecture) * DTYPE_BYTES[recipe.weight]
    states = optimizer_state_bytes(spec.architecture, recipe, spec.optimizer)
    clipping = CLIPPING_PASSES * weights if spec.max_grad_norm is not None else 0
    return (3 * weights + 2 * states + clipping) / ranks / card.memory


def transfer_seconds(spec: RunSpec, card: Rates, forward: float, backward: float, hosted_bytes: int) -> float:
    """Seconds of a step that wait for a link: what is longer than the compute beside it, or all of it without overlap.

    Each link (device to host, host to device, CPU memory, NVMe, between ranks) works beside the others; with overlap
    a phase waits only for its slowest one. Nothing is computed beside what has to come after backward: an update that
    waits for clipping, or that of the gradients which come last.
    """
    waits: defaultdict[str, float] = defaultdict(float)
    for phase, link, seconds in transfers(spec, card, hosted_bytes):
        waits[f"{phase}|{link}"] += seconds
    if not spec.offload_overlap:
        return float(sum(waits.values()))
    exposed = 0.0
    for phase, compute in (("forward", forward), ("backward", backward), ("optimizer", 0.0)):
        slowest = max((s for key, s in waits.items() if key.startswith(phase)), default=0.0)
        behind = _last_update_seconds(spec, card) if phase == _update_phase(spec) == "backward" else 0.0
        exposed += max(behind, slowest - compute)
    return exposed


def _update_phase(spec: RunSpec) -> str:
    """Clipping waits for the last gradient."""
    return "backward" if spec.max_grad_norm is None else "optimizer"


def _last_update_seconds(spec: RunSpec, card: Rates) -> float:
    """The embedding's, the head's and the first block's gradients come last: down, update and up are still to do."""
    if spec.offload_optimizer == "none":
        return 0.0
    arch, dtype = spec.architecture, RECIPES[spec.precision].weight
    early = block_bytes(arch, dtype) * (arch.layers - 1) / (parameter_elements(arch) * DTYPE_BYTES[dtype])
    whole = _weights_seconds(spec, card) + sum(seconds for _, seconds in _update_transfers(spec, card))
    return (1 - early) * whole


def _weights_seconds(spec: RunSpec, card: Rates) -> float:
    """A rank's weights, or as many gradients, once over the link to the host."""
    weights = parameter_elements(spec.architecture) * DTYPE_BYTES[RECIPES[spec.precision].weight]
    return weights / (spec.world_size if spec.sharding == "zero-3" else 1) / card.host_link


def _update_transfers(spec: RunSpec, card: Rates) -> Iterable[tuple[str, float]]:
    """(link, seconds) of the update of offloaded states, from gradients on the host to weights where they live."""
    arch, recipe, ranks = spec.architecture, RECIPES[spec.precision], spec.world_size
    if spec.offload_optimizer == "none":
        return
    elements, place = parameter_elements(arch), residency(spec)
    weights = elements * DTYPE_BYTES[recipe.weight]
    host_rate = min(HOST_BYTES_PER_SECOND, NODE_HOST_BYTES_PER_SECOND / min(ranks, NODE_GPUS))
    clipping = CLIPPING_PASSES * weights if spec.max_grad_norm is not None else 0
    own = ranks if spec.sharding != "none" else 1
    yield "cpu", (HOST_ADAM_BYTES * elements + clipping) / own / host_rate
    if spec.offload_parameters == "none":
        yield "up", _weights_seconds(spec, card)
    if spec.offload_optimizer == "nvme":
        yield "nvme-read", place.nvme / NVME_READ_BYTES_PER_SECOND
        yield "nvme-write", place.nvme_written / NVME_WRITE_BYTES_PER_SECOND


def transfers(spec: RunSpec, card: Rates, hosted_bytes: int) -> Iterable[tuple[str, str, float]]:
    """(phase beside which it runs, link, seconds) of everything that moves in one optimizer step."""
    arch, recipe, ranks = spec.architecture, RECIPES[spec.precision], spec.world_size
    micro = spec.grad_accumulation
    weights = parameter_elements(arch) * DTYPE_BYTES[recipe.weight]
    shard = ranks if spec.sharding == "zero-3" else 1
    if spec.offload_optimizer != "none":
        yield "backward", "down", _weights_seconds(spec, card) * micro
    for link, seconds in _update_transfers(spec, card):
        yield _update_phase(spec), link, seconds
    if spec.offload_parameters != "none":
        blocks = block_bytes(arch, recipe.weight) * arch.layers / shard
        for phase in ("forward", "backward"):
            yield phase, "up", blocks / card.host_link * micro
            if spec.offload_parameters == "nvme":
                yield phase, "nvme-read", blocks / NVME_READ_BYTES_PER_SECOND * micro
    if hosted_bytes:
        yield "forward", "down", hosted_bytes / card.host_link * micro
        yield "backward", "up", hosted_bytes / card.host_link * micro
    if ranks > 1:
        ring = weights * (ranks - 1) / ranks / card.peers
        if spec.sharding == "zero-3":
            yield "forward", "peers", ring * micro
            yield "backward", "peers", 2 * ring * micro
        else:
            yield "backward", "peers", 2 * ring


def timing(spec: RunSpec, schedule: Schedule, hosted_bytes: int) -> Timing:
    """FLOPs always; seconds where `gpu` names a card whose peak in the compute dtype is known."""
    card_facts = gpu(spec.gpu) if spec.gpu else None
    compute = RECIPES[spec.precision].compute
    card = rates(card_facts, spec.world_size) if card_facts and compute != "fp32" and not spec.compile else None
    work, micro = step_work(spec, schedule, card), spec.grad_accumulation
    model = work.model_flops * micro
    hardware = (work.forward.flops + work.backward.flops + work.again.flops) * micro
    if card is None or card_facts is None:
        return Timing(model_flops=model, hardware_flops=hardware)
    forward = work.forward.seconds * micro
    backward = (work.backward.seconds + work.again.seconds) * micro
    optimizer = _optimizer_seconds(spec, card)
    exposed = transfer_seconds(spec, card, forward, backward, hosted_bytes)
    step = forward + backward + optimizer + exposed
    peak = card_facts.bf16_flops_per_second or card_facts.fp16_flops_per_second
    return Timing(
        step_seconds=step,
        tokens_per_second=spec.tokens_per_step / step,
        model_flops=model,
        hardware_flops=hardware,
        mfu=model / step / peak if peak else None,
        hfu=hardware / step / peak if peak else None,
        phases_seconds=PhaseSeconds(forward=forward, backward=backward, optimizer=optimizer, exposed_transfer=exposed),
    )


def block_op_costs(spec: RunSpec) -> list[tuple[Op, int, Work]]:
    """(op, bytes it adds to what backward keeps, work to run it once more) of one block: what recomputing is worth."""
    context = context_of(spec)
    tape = block_tape(context)
    card = rates(gpu(spec.gpu), spec.world_size) if spec.gpu else None
    return [
        (op, total_bytes(t for t in op.makes if t.name in tape.saved), forward_work(tape, [op], card))
        for op in tape.ops
    ]
