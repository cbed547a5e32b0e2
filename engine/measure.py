"""Real steps: a timing pass, then a separate memory pass. Runs in a process of its own (see `engine.runner`).

On a CPU every figure comes from the profiler's allocator events of one steady step; on CUDA the peak comes from the
allocator's statistics and the categories from its history.
"""

from __future__ import annotations

import ctypes
import os
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.catalog import gpu_of_device
from engine.closed_form import predict
from engine.environment import environment
from engine.errors import OutOfMemory, UnsupportedError
from engine.methods import check_method
from engine.observe import MemoryPass
from engine.result import Memory, PhaseSeconds, RunResult, Timeline, Timing
from engine.serving import measure_inference
from engine.sharding.launch import measure_ranks
from engine.spec import RunSpec
from engine.trace import Trace, timeline
from engine.training import Training, build, resolve_device
from engine.units import GIB, KIB, format_bytes

Progress = Callable[[str, int, int], None]
"""(phase, step, steps)."""

HOPELESS = 1.25
"""A run on the CPU that needs this many times the machine's memory by closed form is not tried: it would only push
everything else out before the kernel ends it."""
NOISY_SPREAD = 0.10  # a p20-p80 spread above this share of the median earns a warning


M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # malloc.h


def silent(_phase: str, _step: int, _steps: int) -> None:
    """The progress callback of nobody."""


def measure(spec: RunSpec, progress: Progress = silent) -> tuple[RunResult, Timeline | None]:
    """Build the spec, run it, and say what it took. Out of memory is a result; other errors are raised."""
    device = resolve_device(spec.device)
    check_method(spec, "measured", device.type)
    if device.type == "cpu" and (beyond := _beyond_machine(spec)):
        return _out_of_memory(spec, device, beyond), None
    if spec.mode == "train" and spec.world_size > 1:
        return measure_ranks(spec, device.type, progress)
    return measure_here(spec, device, progress)


def _beyond_machine(spec: RunSpec) -> OutOfMemory | None:
    """Why a run on this machine's CPU is hopeless, if it is. Models without a closed form are tried."""
    try:
        needed = (predict(spec).memory.device_peak_bytes or 0) * (spec.world_size if spec.mode == "train" else 1)
    except UnsupportedError:
        return None
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed <= HOPELESS * there:
        return None
    return OutOfMemory(
        f"not tried, the closed form needs {format_bytes(needed)} and this machine has {format_bytes(there)}; "
        "use method=simulated"
    )


def measure_here(spec: RunSpec, device: torch.device, progress: Progress) -> tuple[RunResult, Timeline | None]:
    """Measure in this process, whether it is the only one or one rank of several."""
    try:
        with _memory_cap(spec.memory_limit_gib, device):
            run = measure_inference if spec.mode == "inference" else _measure_training
            return run(spec, device, progress)
    except (torch.OutOfMemoryError, OutOfMemory, MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        return _out_of_memory(spec, device, error), None


def _measure_training(spec: RunSpec, device: torch.device, progress: Progress) -> tuple[RunResult, Timeline]:
    progress("build", 0, 1)
    training = build(spec, device)
    if spec.compile:
        training.compile()
    try:
        return _measure_built(training, progress)
    finally:
        training.close()


def _measure_built(training: Training, progress: Progress) -> tuple[RunResult, Timeline]:
    spec, device = training.spec, training.device
    losses = []
    for index in range(spec.warmup):
        progress("warmup", index + 1, spec.warmup)
        losses.append(float(training.step(index)))
    written = training.offload.moved_bytes() if training.offload else {}
    timing, timed_losses = _time_steps(training, progress)
    memory_below = _memory_below(training, written)
    progress("memory", 1, 1)
    trace, reserved = MemoryPass(training).run(spec.warmup + spec.steps)
    result = RunResult(
        spec=spec,
        spec_hash=spec.spec_hash,
        method="measured",
        outcome="ok",
        memory=memory_of(trace, reserved).model_copy(update=memory_below),
        timing=_with_flops(spec, device, timing),
        parameters=sum(parameter.numel() for parameter in training.model.parameters()),
        losses=losses + timed_losses,
        warnings=[*training.notes, *_noise(timing)],
        environment=environment(device) | {"attention_kernel": training.kernel.name},
    )
    return result, timeline(trace)


def memory_of(trace: Trace, reserved_bytes: int | None) -> Memory:
    """The memory part of a result, from a finished trace."""
    peak_time, peak_bytes = trace.peak()
    return Memory(
        device_peak_bytes=peak_bytes,
        device_reserved_bytes=reserved_bytes,
        host_peak_bytes=0,
        nvme_bytes=0,
        saved_activation_bytes=trace.saved_bytes(),
        peak_phase=trace.phase_at(peak_time),
        at_peak=trace.at(peak_time),
    )


def _memory_below(training: Training, moved_before: dict[str, int]) -> dict[str, int]:
    """What the lower tiers hold at most, and what a timed step writes to the disk."""
    if training.offload is None:
        return {}
    ledger = training.offload.ledger
    moved = training.offload.moved_bytes()
    written = (moved.get("written", 0) - moved_before.get("written", 0)) // training.spec.steps
    held = {"host_peak_bytes": ledger.host.peak_bytes, "nvme_bytes": ledger.nvme.peak_bytes}
    return held | ({"nvme_written_bytes_per_step": written} if ledger.nvme.peak_bytes else {})


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time_steps(training: Training, progress: Progress) -> tuple[Timing, list[float]]:
    """Median, p20 and p80 of the timed steps, and the phases' medians."""
    spec, device = training.spec, training.device
    phases: dict[str, list[float]] = defaultdict(lambda: [0.0] * spec.steps)

    def exposed() -> float:
        return training.offload.ledger.exposed() if training.offload else 0.0

    @contextmanager
    def clock(name: str) -> Iterator[None]:
        start, exposed_before = time.perf_counter(), exposed()
        yield
        _synchronize(device)
        waited = exposed() - exposed_before
        phases[name][index] += time.perf_counter() - start - waited
        phases["exposed_transfer"][index] += waited

    seconds, losses = [], []
    for index in range(spec.steps):
        progress("timing", index + 1, spec.steps)
        _synchronize(device)
        start = time.perf_counter()
        loss = training.step(spec.warmup + index, clock)
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
    median = statistics.median(seconds)
    totals = {name: statistics.median(values) for name, values in phases.items()}
    p20, p80 = _quantile(seconds, 0.2), _quantile(seconds, 0.8)
    timing = Timing(
        step_seconds=median,
        step_seconds_p20=p20,
        step_seconds_p80=p80,
        steps=spec.steps,
        tokens_per_second=spec.tokens_per_step / median,
        phases_seconds=PhaseSeconds(**totals),
    )
    return timing, losses


def _with_flops(spec: RunSpec, device: torch.device, timing: Timing) -> Timing:
    """FLOPs of the step by the closed form, and the share of the card's dense peak that they came to.

    Left unknown for models that have no closed form, and shares for devices that the catalog does not hold.
    """
    try:
        counted = predict(spec).timing
    except UnsupportedError:
        return timing
    timing.model_flops, timing.hardware_flops = counted.model_flops, counted.hardware_flops
    card = gpu_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    peak = card.bf16_flops_per_second if card and spec.precision != "fp32" else None
    if peak and timing.step_seconds and timing.model_flops and timing.hardware_flops:
        timing.mfu = timing.model_flops / timing.step_seconds / peak
        timing.hfu = timing.hardware_flops / timing.step_seconds / peak
    return timing


def _quantile(values: list[float], share: float) -> float:
    """Linear interpolation between order statistics."""
    ranked = sorted(values)
    position = share * (len(ranked) - 1)
    low = int(position)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (position - low)


def _noise(timing: Timing) -> list[str]:
    if timing.step_seconds and timing.step_seconds_p20 is not None and timing.step_seconds_p80 is not None:
        spread = (timing.step_seconds_p80 - timing.step_seconds_p20) / timing.step_seconds
        if spread > NOISY_SPREAD:
            return [f"step times spread over {spread:.0%} of their median (p20 to p80): compare them with care"]
    return []


@contextmanager
def _memory_cap(limit_gib: float | None, device: torch.device) -> Iterator[None]:
    """Cap the device tier: CUDA's memory fraction, or RLIMIT_DATA above what this process holds already."""
    if limit_gib is None:
        yield
        return
    limit_bytes = int(limit_gib * GIB)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        yield
        return
    _return_freed_memory()
    _start_threads()
    held = _data_bytes()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _return_freed_memory() -> None:
    """Have glibc give every large block back as soon as it is freed, so that RLIMIT_DATA caps what is alive.

    By default it raises its threshold to 32 MiB and keeps such blocks, in pieces, in a heap for each thread.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 64 * KIB)
        mallopt(M_ARENA_MAX, 1)


def _start_threads() -> None:
    """Threads of the CPU kernels and of the profiler take their stacks (8 MiB each) before the cap, not out of it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True):
        x = torch.ones(2**20, requires_grad=True)
        (x * x).sum().backward()


def _data_bytes() -> int:
    """VmData of this process: private writable mappings, what RLIMIT_DATA counts."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmData line")


def _is_out_of_memory(error: BaseException) -> bool:
    """CUDA raises its own class; the CPU allocator a RuntimeError that says so, a thread without room for its stack
    another."""
    if isinstance(error, torch.OutOfMemoryError | OutOfMemory | MemoryError):
        return True
    said = ("can't allocate memory", "Cannot allocate memory", "Resource temporarily unavailable")
    return any(words in str(error) for words in said)


def _out_of_memory(spec: RunSpec, device: torch.device, error: BaseException) -> RunResult:
    limit = spec.memory_limit_gib
    cap = f" under the cap of {format_bytes(int(limit * GIB))}" if limit is not None else ""
    reason = " ".join(str(error).split())[:400] or type(error).__name__
    return RunResult(
        spec=spec,
        spec_hash=spec.spec_hash,
        method="measured",
        outcome="oom",
        error=f"out of memory{cap}: {reason}",
        environment=environment(device),
    )
