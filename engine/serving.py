"""Measured and simulated results of an inference run: weights, KV cache, activations; first token, decode rate."""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.environment import environment
from engine.inference import Inference, build_inference
from engine.observe import MemoryPass, marked
from engine.recording import StorageRecorder
from engine.result import Inference as InferenceResult
from engine.result import Memory, Method, PhaseSeconds, RunResult, Timeline, Timing
from engine.spec import RunSpec
from engine.trace import Trace, timeline
from engine.training import storage_bytes

Progress = Callable[[str, int, int], None]


def measure_inference(spec: RunSpec, device: torch.device, progress: Progress) -> tuple[RunResult, Timeline]:
    """Time `steps` requests, then watch the memory of one more."""
    progress("build", 0, 1)
    run = build_inference(spec, device)
    try:
        for index in range(spec.warmup):
            progress("warmup", index + 1, spec.warmup)
            run.step(index)
        seconds = _time_requests(run, progress)
        progress("memory", 1, 1)
        trace, reserved_bytes = MemoryPass(run).run(spec.warmup + spec.steps)
        generated = run.step(spec.warmup + spec.steps)[0].tolist() if spec.new_tokens else []
        result = _result(run, "measured", trace)
        result.memory.device_reserved_bytes = reserved_bytes
        result.environment = environment(device) | {"attention_kernel": run.kernel.name}
        _add_times(result, seconds, generated)
        return result, timeline(trace)
    finally:
        run.close()


def simulate_inference(spec: RunSpec) -> tuple[RunResult, Timeline]:
    """Memory of one request of the real model on fake tensors."""
    cpu = torch.device("cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        run = build_inference(spec, cpu)
        try:
            run.step(0)
            trace = _record(run)
            result = _result(run, "simulated", trace)
        finally:
            run.close()
    result.environment = environment(cpu) | {"device_kind": "fake", "attention_kernel": run.kernel.name}
    return result, timeline(trace)


def _time_requests(run: Inference, progress: Progress) -> dict[str, list[float]]:
    """Seconds of each timed request's `prefill` and `decode`."""
    seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def clock(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if run.device.type == "cuda":
            torch.cuda.synchronize(run.device)
        seconds[name].append(time.perf_counter() - start)

    for index in range(run.spec.steps):
        progress("timing", index + 1, run.spec.steps)
        run.step(run.spec.warmup + index, clock)
    return seconds


def _record(run: Inference) -> Trace:
    """One request on fake tensors, every storage seen."""
    recording = StorageRecorder(run.resident())

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        recording.mark(f"phase|{name}|+")
        yield
        recording.mark(f"phase|{name}|-")

    if run.offload:
        run.offload.observe(recording.notice)
    gc.collect()
    with recording, marked(run.model, run.blocks, recording.mark):
        run.step(1, phase)
    return recording.recorder.finish(run.base_bytes(), "events")


def _result(run: Inference, method: Method, trace: Trace) -> RunResult:
    """The memory side of a result."""
    spec = run.spec
    peak_time, peak_bytes = trace.peak()
    at_peak = trace.at(peak_time)
    allocated_bytes = storage_bytes(run.cache_tensors())
    weights_bytes = storage_bytes(run.model.parameters())
    ledger = run.offload.ledger if run.offload else None
    return RunResult(
        spec=spec,
        spec_hash=spec.spec_hash,
        method=method,
        outcome="ok",
        memory=Memory(
            device_peak_bytes=peak_bytes,
            host_peak_bytes=ledger.host.peak_bytes if ledger else 0,
            nvme_bytes=ledger.nvme.peak_bytes if ledger else 0,
            peak_phase=trace.phase_at(peak_time),
            at_peak=at_peak,
        ),
        inference=InferenceResult(
            weights_bytes=weights_bytes,
            kv_cache_bytes=run.prompt_cache_bytes(),
            kv_cache_allocated_bytes=allocated_bytes,
            activation_peak_bytes=peak_bytes - at_peak.parameters - allocated_bytes,
        ),
        parameters=sum(parameter.numel() for parameter in run.model.parameters()),
        warnings=list(run.notes),
    )


def _add_times(result: RunResult, seconds: dict[str, list[float]], generated: list[int]) -> None:
    """The timing side: medians over the requests; the spread is of whole requests."""
    spec = result.spec
    whole = [sum(parts) for parts in zip(*seconds.values(), strict=True)]
    median, prefill, decode = (statistics.median(x) for x in (whole, seconds["prefill"], seconds["decode"]))
    fifths = statistics.quantiles(whole, n=5, method="inclusive") if len(whole) > 1 else [median, median]
    result.timing = Timing(
        step_seconds=median,
        step_seconds_p20=fifths[0],
        step_seconds_p80=fifths[-1],
        steps=len(whole),
        tokens_per_second=spec.micro_batch * (spec.seq + spec.new_tokens) / median,
        phases_seconds=PhaseSeconds(forward=median),
    )
    assert result.inference is not None
    result.inference.time_to_first_token_seconds = prefill
    if spec.new_tokens > 1:
        result.inference.decode_tokens_per_second = spec.micro_batch * (spec.new_tokens - 1) / decode
    result.inference.generated_tokens = generated
