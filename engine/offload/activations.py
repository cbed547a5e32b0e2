"""Saved tensors wait for backward on the host.

Hooks on what autograd saves send each *storage* down once, however many views of it are saved, and give every view
back with its own shape and strides. Placed outside a checkpointed region they see only the region's inputs: what the
policy keeps is what travels. Left on the device: parameters, small tensors, and everything from the last block on,
whose backward comes first.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from engine.offload.layout import PARCELS_AHEAD
from engine.offload.link import Copy, Link
from engine.offload.tiers import Arena

MIN_BYTES = 2**20  # below this a transfer's fixed cost outweighs what it frees


class Parcel:
    """One storage on the host, and its copy on the device once backward asks for it."""

    def __init__(self, number: int, storage: Tensor, link: Link, arena: Arena) -> None:
        """`storage` is the whole storage as a flat tensor, `number` its place in the order of forward."""
        self.link, self.arena = link, arena
        self.block = arena.take(storage.nbytes)
        self.down, self.up = link.down(storage, self.block), Copy()
        self.flat = (storage.numel(), storage.dtype, storage.device)
        self.restored: Tensor | None = None
        self.number = number

    def restore(self) -> Tensor:
        """Start the way up, once. The storage is whole after `up.join()`."""
        if self.restored is None:
            count, dtype, device = self.flat
            self.down.wait()
            self.restored = torch.empty(count, dtype=dtype, device=device)
            self.up = self.link.up(self.block, self.restored)
        return self.restored

    def __del__(self) -> None:
        self.down.wait()
        self.up.wait()
        self.arena.give(self.block)


class View:
    """What autograd holds in place of a saved tensor."""

    def __init__(self, parcel: Parcel, tensor: Tensor) -> None:
        self.parcel, self.dtype = parcel, tensor.dtype
        self.geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())


class ActivationOffload:
    """A context for the forward pass. `last` is the module from which on nothing is sent."""

    def __init__(
        self, last: nn.Module, parameters: Iterable[Tensor], link: Link, arena: Arena, *, min_bytes: int = MIN_BYTES
    ) -> None:
        self.link, self.arena, self.min_bytes = link, arena, min_bytes
        self.kept = {parameter.untyped_storage()._cdata for parameter in parameters}
        # Address, version -> parcel. The weak reference to the storage keeps its address from being used again.
        self.sent: dict[tuple[int, int], tuple[StorageWeakRef, weakref.ref[Parcel]]] = {}
        self.order: list[weakref.ref[Parcel]] = []
        self.paused = True
        self.hooks = saved_tensors_hooks(self._pack, self._unpack)
        last.register_forward_pre_hook(self._pause)

    def __enter__(self) -> None:
        self.paused = False
        self.order.clear()
        self.hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        self.hooks.__exit__(*error)
        self.sent.clear()

    def _pause(self, _module: nn.Module, _inputs: Any) -> None:
        self.paused = True

    @torch.no_grad()
    def _pack(self, tensor: Tensor) -> Tensor | View:
        storage = tensor.untyped_storage()
        if self.paused or storage.nbytes() < self.min_bytes or storage._cdata in self.kept:
            return tensor
        key = (storage._cdata, tensor._version)
        parcel = self.sent[key][1]() if key in self.sent else None
        if parcel is None:
            with self.link.ledger.waiting():
                whole = tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
                parcel = Parcel(len(self.order), whole, self.link, self.arena)
            self.sent[key] = StorageWeakRef(storage), weakref.ref(parcel)
            self.order.append(weakref.ref(parcel))
        return View(parcel, tensor)

    @torch.no_grad()
    def _unpack(self, saved: Tensor | View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        whole = saved.parcel.restore()
        with self.link.ledger.waiting():
            saved.parcel.up.join()
        if self.link.overlap:
            self._restore_ahead(saved.parcel.number)
        return whole.view(saved.dtype).as_strided(*saved.geometry)

    def _restore_ahead(self, number: int) -> None:
        """Backward asks in the opposite order: start what comes next."""
        for reference in reversed(self.order[max(0, number - PARCELS_AHEAD) : number]):
            if parcel := reference():
                parcel.restore()
