"""One step of a training run on fake tensors, recorded: births and deaths of storages, blocks, phases, FLOPs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from engine import fake_ops
from engine.checkpointing.replay import replaying
from engine.extrapolate import BaseStorage, Step
from engine.observe import apply_mark, marked
from engine.trace import Recorder
from engine.training import Training

Cut = Callable[[int | None], None]


FORMULAS = flop_registry | {torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm]}
"""torch's table knows the product that is added out of place only."""

SCORES_AGAIN = 5
"""One of the five products of a flash attention's backward makes the scores again."""


def _is_flash_backward(packet: Any) -> bool:
    return "attention" in packet.__name__ and packet.__name__.endswith("backward")


class StorageRecorder(TorchDispatchMode):
    """Sees every tensor an operator returns; a storage not seen before is an allocation, its collection a free.

    Time is the number of the event.
    """

    def __init__(self, known: list[Tensor]) -> None:
        TorchDispatchMode.__init__(self)
        self.recorder = Recorder()
        self.clock = 0
        self.known = {_key(tensor) for tensor in known}
        self.cuts: list[tuple[float, int | None]] = []
        self.owners: dict[int, int | None] = {}
        """Storage -> block, of what the optimizer works on; empty outside the optimizer's phase."""
        self.flops: list[tuple[float, int, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes again as what it does to this rank's part
        if self.owners:
            self._turn_to(args)
        if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled() and self._in_backward():
            output = _sum_of_gradients(*args, **(kwargs or {}))
        else:
            output = fake_ops.run(func, args, kwargs or {})
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        if (formula := FORMULAS.get(func._overloadpacket)) is not None:
            self._count(func._overloadpacket, formula(*args, **(kwargs or {}), out_val=output))
        return output

    def _count(self, packet: Any, flops: int) -> None:
        """Note an operator's FLOPs, those that only repeat forward's work apart."""
        if self._in_backward() and (self.recorder.open_blocks or replaying()):
            self.flops.append((self._tick(), flops, True))
            return
        again = flops // SCORES_AGAIN if _is_flash_backward(packet) else 0
        self.flops.append((self._tick(), flops - again, False))
        if again:
            self.flops.append((self._tick(), again, True))

    def _in_backward(self) -> bool:
        return bool(self.recorder.phases) and self.recorder.phases[-1].name == "backward"

    def mark(self, text: str) -> None:
        apply_mark(self.recorder, text, self._tick())

    def cut(self, block: int | None) -> None:
        self.cuts.append((self._tick(), block))

    def notice(self, kind: str, tensor: Tensor) -> None:
        """Offloading makes a gradient its own, and a storage that it has filled a parameter's."""
        key = str(tensor.untyped_storage()._cdata)
        if kind == "grad":
            self.recorder.gradient(key)
        elif kind == "param":
            self.recorder.parameter(key)

    def _turn_to(self, args: Any) -> None:
        """The optimizer now works on the block that the first known storage belongs to."""
        keys = (_key(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        storage = next((key for key in keys if key in self.owners), None)
        if storage is not None and (not self.cuts or self.cuts[-1][1] != self.owners[storage]):
            self.cut(self.owners[storage])

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.known or str(key) in self.recorder.live:
            return
        self.recorder.allocate(str(key), storage.nbytes(), self._tick())
        weakref.finalize(storage, self._free, str(key)).atexit = False

    def resized(self, storage: torch.UntypedStorage) -> None:
        """FSDP2 and offloading give a parameter its memory and take it back, the storage stays."""
        self._free(str(storage._cdata))
        if storage.nbytes():
            self.recorder.allocate(str(storage._cdata), storage.nbytes(), self._tick())

    def _free(self, key: str) -> None:
        self.owners.pop(int(key), None)  # the next storage may get its name
        self.recorder.free(key, self._tick())

    def _tick(self) -> int:
        self.clock += 1
        return self.clock


# What torch counts of a gradient that only the engine's buffer holds, seen from inside a dispatch mode.
SOLE_TENSOR_USES = 4
SOLE_STORAGE_USES = 2


def _sum_of_gradients(first: Tensor, second: Tensor | float, **options: Any) -> Tensor:
    """A second gradient reaches a tensor: autograd adds it in place to one that nobody else holds.

    It does so for plain tensors only, so that fake ones would show a third tensor at each residual connection
    (torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`).
    """
    if isinstance(second, Tensor) and first.shape == second.shape and first.dtype == second.dtype and not options:
        pairs: list[tuple[Any, Tensor]] = [(first, second), (second, first)]
        for target, other in pairs:
            storage = target.untyped_storage()
            sole = torch._C._storage_Use_Count(storage._cdata) <= SOLE_STORAGE_USES
            if sole and target._use_count() <= SOLE_TENSOR_USES and is_non_overlapping_and_dense_or_false(target):
                added: Tensor = target.add_(other)
                return added
    return torch.add(first, second, **options)


def record_step(training: Training, index: int) -> Step:
    """One step of a training run built under a fake tensor mode."""
    optimizer = training.optimizer
    known = [*training.model.parameters(), *training.model.buffers(), *optimizer.tensors(), *optimizer.buffers]
    base = base_storages(training)
    recording = StorageRecorder(known)

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        recording.mark(f"phase|{name}|+")
        if name == "optimizer":
            recording.owners = block_of_storages(training)
        yield
        recording.owners = {}
        recording.mark(f"phase|{name}|-")

    if training.offload:
        training.offload.observe(recording.notice)
    gc.collect()
    gc.disable()  # when cycles die must not depend on how many objects there are
    try:
        with (
            recording,
            resizes(recording.resized),
            marked(training.model, training.blocks, recording.mark),
            backward_cuts(training.blocks, recording.cut),
        ):
            training.step(index, phase)
    finally:
        gc.enable()
    trace = recording.recorder.finish(training.base_bytes(), "events")
    return Step(trace, len(training.blocks), base, recording.cuts, recording.flops)


@contextmanager
def resizes(notice: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Say when a storage has been given another size, which is no operator."""
    resize = torch.UntypedStorage.resize_

    def noticed(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resize(storage, size)
        notice(storage)
        return storage

    with patch.object(torch.UntypedStorage, "resize_", noticed):
        yield


@contextmanager
def backward_cuts(blocks: list[nn.Module], cut: Cut) -> Iterator[None]:
    """Say when backward enters each block, and when it leaves the first."""

    def watch(tensor: Any, block: int | None) -> None:
        tensor = tensor[0] if isinstance(tensor, tuple) else tensor
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: cut(block))

    handles = [blocks[0].register_forward_pre_hook(lambda _, inputs: watch(inputs, None))]
    for index, block in enumerate(blocks):
        handles.append(block.register_forward_hook(lambda *seen, index=index: watch(seen[-1], index)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """What lies behind a tensor; behind a sharded one, this rank's part."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def block_of_storages(training: Training) -> dict[int, int | None]:
    """Storage of each parameter, buffer, gradient and optimizer state -> its block, None outside the blocks."""
    model = training.model
    block: dict[int, int | None] = dict.fromkeys(map(_key, (*model.parameters(), *model.buffers())))
    for index, module in enumerate(training.blocks):
        block |= dict.fromkeys(map(_key, (*module.parameters(), *module.buffers())), index)
    for slot in getattr(training.optimizer, "slots", ()):
        block |= dict.fromkeys(map(_key, slot.tensors), block[_key(slot.parameter)])
    gradients = [(p.grad, block[_key(p)]) for p in model.parameters() if p.grad is not None]
    gradients += [(u.grad, block[_key(u.flat)]) for u in getattr(training.optimizer, "units", ()) if u.grad is not None]
    return block | {_key(grad): index for grad, index in gradients}


def _key(tensor: Tensor) -> int:
    key: int = storage_of(tensor)._cdata
    return key


def base_storages(training: Training) -> list[BaseStorage]:
    """What is alive between steps, each storage once, with the block it belongs to."""
    block = block_of_storages(training)
    parts = {
        "parameters": [*training.model.parameters(), *training.model.buffers()],
        "optimizer_states": training.optimizer.tensors(),
        "temporaries": training.optimizer.buffers,
    }
    seen: set[int] = set()
    storages: list[BaseStorage] = []
    for category, tensors in parts.items():
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                storages.append(BaseStorage(storage.nbytes(), category, block.get(storage._cdata)))
    return storages
