"""Inference: weights, KV cache and the activations of one block; a chunked prefill bounds the last."""

from __future__ import annotations

from dataclasses import replace

from engine.catalog import gpu
from engine.closed_form.block import Context, block_tape, context_of
from engine.closed_form.fits import fits
from engine.closed_form.hardware import rates
from engine.closed_form.pitfalls import window_notes
from engine.closed_form.residency import PREFETCHED, block_bytes
from engine.closed_form.states import parameter_elements, rotary_buffer_bytes
from engine.closed_form.timing import Work, forward_work
from engine.closed_form.walk import Meter, run_forward
from engine.recipes import DTYPE_BYTES, RECIPES
from engine.result import AtPeak, Inference, LedgerRow, Memory, PhaseSeconds, RunResult, Timing
from engine.spec import RunSpec


def cached_layers(spec: RunSpec, positions: int) -> list[tuple[str, int, int]]:
    """(formula, layers, positions kept) by kind of layer. A sliding layer of a transformers class keeps its window;
    Remat's own decoder has no windows and keeps everything."""
    arch = spec.architecture
    sliding = arch.sliding_layers if arch.runs_transformers else 0
    kinds = [
        ("2·L·B·(S+new)·K·D", arch.layers - sliding, positions),
        ("2·L·B·min(S+new, window)·K·D", sliding, min(positions, arch.sliding_window or positions)),
    ]
    return [kind for kind in kinds if kind[1]]


def kv_cache_bytes(spec: RunSpec, positions: int) -> int:
    """2 · B · K · D · bytes an element, for every position that each layer keeps."""
    arch, size = spec.architecture, DTYPE_BYTES[RECIPES[spec.precision].compute]
    kept = sum(layers * length for _, layers, length in cached_layers(spec, positions))
    return 2 * kept * spec.micro_batch * arch.kv_width * size


def activation_bytes(context: Context, keys: int) -> int:
    """The most alive while one block runs without autograd on `context.seq` tokens against `keys`, or at the logits of
    the last position."""
    meter = Meter()
    tape = block_tape(context)
    meter.add("activations", next(iter(tape.inputs.values())).bytes)
    run_forward(meter, tape, ())
    widened = sum(t.bytes for t in tape.tensors.values() if "S²" in t.formula)
    square = meter.peak + widened * (keys - context.seq) // context.seq
    logits = context.batch * context.arch.vocab * DTYPE_BYTES[context.compute] + 8 * context.rows
    return max(square, context.rows * context.arch.hidden * DTYPE_BYTES[context.weight] + logits)


def predict_inference(spec: RunSpec) -> RunResult:
    """Peak memory and, where a card is named, time to first token and decode rate."""
    arch, recipe = spec.architecture, RECIPES[spec.precision]
    size = DTYPE_BYTES[recipe.weight]
    chunk = spec.prefill_chunk or spec.seq
    context = replace(context_of(spec), seq=chunk, dropout=False)
    weights = parameter_elements(arch) * size
    blocks = block_bytes(arch, recipe.weight)
    moved = spec.offload_parameters != "none"
    on_device = weights - blocks * arch.layers + PREFETCHED * blocks if moved else weights
    buffers = rotary_buffer_bytes(arch, spec.seq + spec.new_tokens, recipe.weight)
    cache = kv_cache_bytes(spec, spec.seq + spec.new_tokens)
    activations = activation_bytes(context, spec.seq)
    peak = on_device + buffers + cache + activations
    timing, first, decode = _times(spec, context, on_device)
    return RunResult(
        spec=spec,
        spec_hash=spec.spec_hash,
        method="closed-form",
        outcome="ok",
        memory=Memory(
            device_peak_bytes=peak,
            host_peak_bytes=blocks * arch.layers if spec.offload_parameters == "cpu" else 0,
            nvme_bytes=blocks * arch.layers if spec.offload_parameters == "nvme" else 0,
            peak_phase="prefill",
            at_peak=AtPeak(parameters=on_device + buffers, activations=cache + activations),
        ),
        timing=timing,
        inference=Inference(
            weights_bytes=weights,
            kv_cache_bytes=kv_cache_bytes(spec, spec.seq),
            kv_cache_allocated_bytes=cache,
            activation_peak_bytes=activations,
            time_to_first_token_seconds=first,
            decode_tokens_per_second=decode,
        ),
        parameters=parameter_elements(arch),
        fits=fits(spec, peak),
        ledger=_ledger(spec, weights, activations),
        warnings=[*arch.notes, *window_notes(spec)],
    )


def _times(spec: RunSpec, context: Context, weights_read: int) -> tuple[Timing, float | None, float | None]:
    """Prefill by the roofline of its chunks; decode reads every weight and the cache once a token."""
    arch = spec.architecture
    chunks = -(-spec.seq // context.seq)
    tape = block_tape(context)
    card = None
    if spec.gpu and RECIPES[spec.precision].compute != "fp32" and not spec.compile:
        card = rates(gpu(spec.gpu), 1)
    work = forward_work(tape, tape.ops, card) * (arch.layers * chunks)
    work += Work(2 * spec.micro_batch * arch.vocab * arch.hidden)
    if card is None:
        return Timing(model_flops=work.flops, hardware_flops=work.flops), None, None
    transferred = block_bytes(arch, RECIPES[spec.precision].weight) * arch.layers
    moved = transferred / card.host_link if spec.offload_parameters != "none" else 0.0
    prefill = max(work.seconds, moved * chunks)
    token = max((weights_read + kv_cache_bytes(spec, spec.seq + spec.new_tokens)) / card.memory, moved)
    total = prefill + token * max(0, spec.new_tokens - 1)
    tokens = spec.micro_batch * (spec.seq + spec.new_tokens)
    timing = Timing(
        step_seconds=total,
        tokens_per_second=tokens / total,
        model_flops=work.flops,
        hardware_flops=work.flops,
        phases_seconds=PhaseSeconds(forward=total, exposed_transfer=max(0.0, moved * chunks - work.seconds)),
    )
    return timing, prefill, spec.micro_batch / token


def _ledger(spec: RunSpec, weights: int, activations: int) -> list[LedgerRow]:
    arch, recipe = spec.architecture, RECIPES[spec.precision]
    return [
        LedgerRow(
            tensor="weights", shape=[parameter_elements(arch)], dtype=recipe.weight, bytes=weights,
            group="outside-blocks", category="parameters", formula="N",
        ),
        *_cache_rows(spec),
        LedgerRow(
            tensor="one block's activations", shape=[spec.micro_batch, spec.prefill_chunk or spec.seq, arch.hidden],
            dtype=recipe.compute, bytes=activations, group="outside-blocks", category="temporaries",
            formula="the most alive while one block runs without autograd",
        ),
    ]  # fmt: skip


def _cache_rows(spec: RunSpec) -> list[LedgerRow]:
    arch, dtype, batch = spec.architecture, RECIPES[spec.precision].compute, spec.micro_batch
    return [
        LedgerRow(
            tensor="kv cache", shape=[2, batch, arch.kv_heads, length, arch.head_dim], dtype=dtype,
            bytes=2 * layers * length * batch * arch.kv_width * DTYPE_BYTES[dtype], group="attention-core",
            count=layers, formula=formula,
        )
        for formula, layers, length in cached_layers(spec, spec.seq + spec.new_tokens)
    ]  # fmt: skip
