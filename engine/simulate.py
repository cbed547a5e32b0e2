"""A training step of the real model on fake tensors: every allocation, no arithmetic, no GPU.

Fake tensors live on device `cpu`: torch cannot run autograd on fake `cuda` without a GPU, and `meta` sends attention
down another path. What a storage costs is the same; the CUDA allocator's rounding and segments are modelled apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.environment import environment
from engine.measure import memory_of
from engine.observe import apply_mark, marked
from engine.result import RunResult, Timeline, Timing
from engine.spec import RunSpec
from engine.trace import Recorder, Trace, timeline
from engine.training import Training, build

CPU = torch.device("cpu")


class StorageRecorder(TorchDispatchMode):
    """Sees every tensor an operator returns; a storage not seen before is an allocation, its collection a free.

    Time is the number of the event.
    """

    def __init__(self, known: list[Tensor]) -> None:
        TorchDispatchMode.__init__(self)
        self.recorder = Recorder()
        self.clock = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return output

    def mark(self, text: str) -> None:
        apply_mark(self.recorder, text, self._tick())

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.known or str(key) in self.recorder.live:
            return
        self.recorder.allocate(str(key), storage.nbytes(), self._tick())
        weakref.finalize(storage, self._free, str(key)).atexit = False

    def _free(self, key: str) -> None:
        self.recorder.free(key, self._tick())

    def _tick(self) -> int:
        self.clock += 1
        return self.clock


def simulate(spec: RunSpec) -> tuple[RunResult, Timeline]:
    """Memory of a steady step, exact to the storage, and the FLOPs it does."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        training = build(spec, CPU)
        training.step(0)  # the first step of a run is not the steady one
        trace = record_step(training, 1)
    result = RunResult(
        spec=spec,
        spec_hash=spec.spec_hash,
        method="simulated",
        outcome="ok",
        memory=memory_of(trace, None),
        timing=Timing(),
        parameters=sum(parameter.numel() for parameter in training.model.parameters()),
        warnings=list(training.notes),
        environment=environment(CPU) | {"device_kind": "fake", "attention_kernel": training.kernel.name},
    )
    return result, timeline(trace)


def record_step(training: Training, index: int) -> Trace:
    """The trace of one step of a training run built under a fake tensor mode."""
    known = [*training.model.parameters(), *training.model.buffers(), *training.optimizer.tensors()]
    base = training.base_bytes()
    recording = StorageRecorder(known)

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        recording.mark(f"phase|{name}|+")
        yield
        recording.mark(f"phase|{name}|-")

    with recording, marked(training.model, training.blocks, recording.mark):
        training.step(index, phase)
    return recording.recorder.finish(base, "events")
