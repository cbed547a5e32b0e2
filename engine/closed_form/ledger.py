"""Every tensor that a prediction counts, as rows that can be opened: name, shape, dtype, bytes, formula, source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.architecture import Parameter, parameter_table
from engine.closed_form.block import block_tape, context_of, embedding_tape
from engine.closed_form.hardware import RESERVED_OVER_MAIN
from engine.closed_form.loss import final_norm_tape, fused_loss, standard_loss_tape
from engine.closed_form.residency import residency
from engine.closed_form.schedule import SMALLEST_PARCEL, Leaf, Schedule
from engine.closed_form.states import parameter_elements, rotary_buffer_bytes
from engine.closed_form.tape import OUTSIDE, Tensor
from engine.closed_form.training import Step
from engine.recipes import DTYPE_BYTES, RECIPES
from engine.result import LedgerRow
from engine.spec import RunSpec

SAVED = "torch autograd: what the op's backward reads (engine/closed_form/block.py)"


def ledger(spec: RunSpec, schedule: Schedule) -> list[LedgerRow]:
    """Rows of category `activations` sum to `saved_activation_bytes`; the others are what is alive between steps (of
    one unsharded copy), and the gradients."""
    return [*_activation_rows(spec, schedule), *_state_rows(spec)]


def _row(tensor: Tensor, count: int, *, name: str = "", category: str = "activations") -> LedgerRow:
    return LedgerRow(
        tensor=name or tensor.name, shape=list(tensor.shape), dtype=tensor.dtype, bytes=tensor.bytes * count,
        group=tensor.group, count=count, category=category, formula=tensor.formula, source=SAVED,
    )  # fmt: skip


def _activation_rows(spec: RunSpec, schedule: Schedule) -> Iterator[LedgerRow]:
    context = context_of(spec)
    embedding, block, final_norm = embedding_tape(context), block_tape(context), final_norm_tape(context)
    hosted = spec.offload_activations != "none"
    yield from _rows(embedding.saved.values(), 1)
    boundary = next(iter(block.inputs.values()))
    for position, (node, count) in enumerate(schedule):
        last = position == len(schedule) - 1
        kept = block.kept(node.recomputed).values() if isinstance(node, Leaf) else (boundary,)
        for tensor in kept:
            away = hosted and tensor.bytes >= SMALLEST_PARCEL
            name = f"block.{tensor.name}" if isinstance(node, Leaf) else "segment.x"
            on_device = count if not away else int(last)
            if on_device:
                yield _row(tensor, on_device, name=name)
            if count - on_device:
                yield _row(tensor, count - on_device, name=name, category="host activations")
    yield from _rows(final_norm.saved.values(), 1, prefix="final.")
    if spec.fused_loss:
        yield from _rows(fused_loss(context, spec.loss_chunks).kept, 1)
    else:
        tape = standard_loss_tape(context)
        yield from _rows(tape.saved.values(), 1)
        yield _row(tape.tensors["loss"], 1)


def _rows(tensors: Iterable[Tensor], count: int, *, prefix: str = "") -> list[LedgerRow]:
    return [_row(tensor, count, name=f"{prefix}{tensor.name}") for tensor in tensors]


def _state_rows(spec: RunSpec) -> Iterator[LedgerRow]:
    arch, recipe = spec.architecture, RECIPES[spec.precision]
    place = residency(spec)
    states = "optimizer_states" if spec.offload_optimizer == "none" else f"{spec.offload_optimizer} optimizer_states"
    moments = {"adamw": recipe.moment, "adamw-8bit": "int8"}.get(spec.optimizer)
    for parameter in parameter_table(arch):
        yield _parameter_row(parameter, recipe.weight, "parameters", parameter.name)
        yield _parameter_row(parameter, recipe.weight, "gradients", f"{parameter.name}.grad")
        if recipe.master:
            yield _parameter_row(parameter, "fp32", states, f"{parameter.name}.master")
        if moments:
            yield _parameter_row(parameter, moments, states, f"{parameter.name}.moments", copies=2)
    if buffers := rotary_buffer_bytes(arch, spec.seq, recipe.weight):
        yield LedgerRow(
            tensor="rotary tables", shape=[2, spec.seq, arch.head_dim], dtype=recipe.weight, bytes=buffers,
            group=OUTSIDE, category="parameters", formula="2·S·D", source="engine/models/decoder.py",
        )  # fmt: skip
    if place.working_parameters:
        yield LedgerRow(
            tensor="blocks at work", shape=[parameter_elements(arch)], dtype=recipe.weight,
            bytes=place.working_parameters, group=OUTSIDE, category="parameters",
            formula="the block that runs and the next one, whole", source="FSDP2 / ZeRO-3 prefetch",
        )  # fmt: skip


def reserved_rows(step: Step) -> list[LedgerRow]:
    """What the caching allocator of a CUDA device reserves beyond the most that is alive outside the side streams."""
    if step.gathering is None:
        return []
    gathered, scattered, main = step.gathering.gathered.peak, step.gathering.scattered.peak, step.meter.main_peak
    collectives = "torch, _fsdp_collectives.py: allocated on a stream of its own, whose memory serves no other"
    return [
        _reserved("pool of the gather stream", gathered, "the gathered buffer and the next one", collectives),
        _reserved("pool of the scatter stream", scattered, "the sharded gradients", collectives),
        _reserved(
            "the allocator's gaps", round((RESERVED_OVER_MAIN - 1) * main), f"{RESERVED_OVER_MAIN - 1:.0%} of the rest",
            "torchtitan #165, 90th percentile of its eager FSDP2 runs",
        ),
    ]  # fmt: skip


def _reserved(name: str, count: int, formula: str, source: str) -> LedgerRow:
    return LedgerRow(
        tensor=name, shape=[], dtype="", bytes=count, group=OUTSIDE, category="reserved", formula=formula, source=source
    )


def _parameter_row(parameter: Parameter, dtype: str, category: str, name: str, copies: int = 1) -> LedgerRow:
    count = parameter.count * copies
    return LedgerRow(
        tensor=name, shape=list(parameter.shape), dtype=dtype, group=parameter.group, count=count, category=category,
        bytes=parameter.elements * DTYPE_BYTES[dtype] * count, source="ZeRO, arXiv 1910.02054, section 3.1",
    )  # fmt: skip
