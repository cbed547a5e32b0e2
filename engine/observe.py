"""The memory pass: one steady step whose allocations and frees become a `Trace`.

CPU: the profiler's allocator events carry addresses; marks for phases, blocks and gradients are profiler ranges, so
that marks and allocations share one clock. CUDA: the allocator's own history, marked the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

from engine.offload.assembly import Offload
from engine.trace import Recorder, Trace
from engine.training import PhaseMarker

MARK = "remat|"

Mark = Callable[[str], None]
"""Leaves a mark in the trace: `phase|NAME|+`, `block|NAME|-`, `grad|ADDRESS`, `param|ADDRESS`."""


class Run(Protocol):
    """What can be watched: a built training or inference run."""

    device: torch.device
    blocks: list[nn.Module]
    offload: Offload | None

    @property
    def model(self) -> nn.Module: ...

    def step(self, index: int, marker: PhaseMarker) -> Tensor: ...

    def base_bytes(self) -> dict[str, int]: ...


class MemoryPass:
    """Watches one step of a built run."""

    def __init__(self, training: Run) -> None:
        self.training = training
        self.base = training.base_bytes()

    def run(self, index: int) -> tuple[Trace, int | None]:
        """The trace of the step of that index, and the bytes the CUDA allocator reserved (None on a CPU)."""
        if self.training.device.type == "cuda":
            return self._run_cuda(index)
        return self._run_cpu(index), None

    def _step(self, index: int, mark: Mark) -> None:
        @contextmanager
        def phase(name: str) -> Iterator[None]:
            mark(f"phase|{name}|+")
            yield
            mark(f"phase|{name}|-")

        if self.training.offload:
            self.training.offload.observe(lambda kind, tensor: mark(f"{kind}|{storage_key(tensor)}"))
        with marked(self.training.model, self.training.blocks, mark):
            self.training.step(index, phase)

    def _run_cpu(self, index: int) -> Trace:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            self._step(index, _profiler_mark)
        assert profiler.profiler is not None
        results = profiler.profiler.kineto_results
        assert results is not None
        return _replay(_cpu_events(results.experimental_event_tree()), self.base)

    def _run_cuda(self, index: int) -> tuple[Trace, int]:
        device = self.training.device
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        marks: list[tuple[int, str, int]] = []
        torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python")
        try:
            self._step(index, lambda text: marks.append((time.time_ns(), text, 0)))
            torch.cuda.synchronize(device)
            snapshot = torch.cuda.memory._snapshot(device)
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        history = snapshot["device_traces"][device.index or 0]
        events = sorted(marks + _cuda_events(history), key=lambda event: event[0])
        return _replay(events, self.base), torch.cuda.max_memory_reserved(device)


def _profiler_mark(text: str) -> None:
    with record_function(MARK + text):
        pass


@contextmanager
def marked(model: nn.Module, blocks: list[nn.Module], mark: Mark) -> Iterator[None]:
    """Hooks that mark each block's run (forward, and again in a recomputation) and each gradient's birth."""
    handles = []
    for index, block in enumerate(blocks):
        name = f"block {index}"
        handles.append(block.register_forward_pre_hook(lambda *_, name=name: mark(f"block|{name}|+")))
        handles.append(block.register_forward_hook(lambda *_, name=name: mark(f"block|{name}|-"), always_call=True))

    def gradient(parameter: Tensor) -> None:
        if parameter.grad is not None:
            mark(f"grad|{storage_key(parameter.grad)}")

    handles += [p.register_post_accumulate_grad_hook(gradient) for p in model.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def storage_key(tensor: Tensor) -> int:
    """What names a storage in a trace: its address, or a fake storage's identity."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    storage = local.untyped_storage()
    return storage._cdata if isinstance(local, FakeTensor) else storage.data_ptr()


def _cpu_events(tree: list[Any]) -> list[tuple[int, str, int]]:
    """(nanoseconds, mark or address, signed bytes) of the profiler's event tree, in order."""
    events: list[tuple[int, str, int]] = []
    stack = list(tree)
    while stack:
        node = stack.pop()
        stack.extend(node.children)
        if node.name == "[memory]":
            allocation = node.typed[1]
            if allocation.device.type == "cpu":
                events.append((node.start_time_ns, str(allocation.ptr), allocation.alloc_size))
        elif node.name.startswith(MARK):
            events.append((node.start_time_ns, node.name.removeprefix(MARK), 0))
    return sorted(events, key=lambda event: event[0])


def _cuda_events(history: list[dict[str, Any]]) -> list[tuple[int, str, int]]:
    """The same from the CUDA allocator's history. A free counts when it is asked for: the block can be reused then."""
    signs = {"alloc": 1, "free_requested": -1}
    return [
        (entry["time_us"] * 1000, str(entry["addr"]), signs[entry["action"]] * entry["size"])
        for entry in history
        if entry["action"] in signs
    ]


def _replay(events: list[tuple[int, str, int]], base: dict[str, int]) -> Trace:
    """Feed events to a recorder. Times become seconds since the first, strictly increasing."""
    recorder = Recorder()
    origin = events[0][0] if events else 0
    last = -1
    for nanoseconds, text, count in events:
        last = max(last + 1, nanoseconds - origin)
        now = last / 1e9
        if count > 0:
            recorder.allocate(text, count, now)
        elif count < 0:
            recorder.free(text, now)
        else:
            apply_mark(recorder, text, now)
    return recorder.finish(base, "seconds")


def apply_mark(recorder: Recorder, text: str, now: float) -> None:
    """Interpret one mark."""
    kind, _, rest = text.partition("|")
    if kind == "grad":
        recorder.gradient(rest)
    elif kind == "param":
        recorder.parameter(rest)
    elif kind in ("phase", "block"):
        name, _, sign = rest.rpartition("|")
        (recorder.phase if kind == "phase" else recorder.block)(name, now, sign == "+")
