"""A unit's weights and optimizer states in their tier: in host memory for good, or in a file and streamed.

Both tiers answer the same four questions: create a unit from the device's weights, fetch its weights to the device,
load its states for an update, store them after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import RunError
from engine.offload.layout import STATE_BUFFERS, WEIGHT_BUFFERS, Piece, UnitLayout, pool_bytes, unit_layout
from engine.offload.link import Copy, Lane, Link
from engine.offload.nvme import NvmeFile
from engine.offload.tiers import Arena, HostBlock, page_aligned
from engine.optimizers import DTYPES, Slot
from engine.recipes import Recipe

TORCH_DTYPES = {**DTYPES, "int8": torch.int8}


@dataclass(eq=False)
class Unit:
    """Parameters that move together: one block's, or those outside the blocks."""

    name: str
    parameters: list[Tensor]
    layout: UnitLayout
    file_offset: int = 0


def make_units(groups: Sequence[tuple[str, Sequence[Tensor]]], recipe: Recipe, optimizer: str) -> list[Unit]:
    """Units one after another, as they lie in a file."""
    units, offset = [], 0
    for name, members in groups:
        layout = unit_layout([tuple(member.shape) for member in members], recipe, optimizer)
        units.append(Unit(name, list(members), layout, offset))
        offset += layout.total_bytes
    return units


def slots_in(block: HostBlock, layout: UnitLayout) -> list[Slot]:
    """The unit's weights and states as views of one host block. `Slot.parameter` is the host's copy of the weight."""

    def view(piece: Piece) -> Tensor:
        return block.view(piece.offset, piece.shape, TORCH_DTYPES[piece.dtype])

    slots = []
    for pieces in layout.parameters:
        by_kind: dict[str, list[Tensor]] = {}
        for piece in pieces:
            by_kind.setdefault(piece.kind, []).append(view(piece))
        slots.append(
            Slot(
                by_kind["weight"][0],
                master=by_kind.get("master", [None])[0],
                moments=by_kind.get("moment", []),
                scales=by_kind.get("scale", []),
                step=by_kind.get("step", [None])[0],
            )
        )
    return slots


@torch.no_grad()
def fill(slots: list[Slot], parameters: list[Tensor]) -> None:
    """First values: weights and master copies from the device, everything else zero."""
    for slot, parameter in zip(slots, parameters, strict=True):
        for tensor in slot.tensors:
            tensor.zero_()
        for copy in (slot.parameter, slot.master):
            if copy is not None:
                copy.copy_(parameter)


class Buffers:
    """A fixed piece of host memory that blocks are cut from; who finds no room waits until one comes back."""

    def __init__(self, arena: Arena, count: int) -> None:
        self.whole = arena.take(count) if count else HostBlock(0)
        self._gaps = [(0, page_aligned(count))]
        """What is free: (start, stop), in order, no two touching."""
        self._changed = Condition()
        self._closed = False

    def take(self, count: int) -> HostBlock:
        """A block of `count` bytes. Raises RunError when the run has ended meanwhile."""
        size = page_aligned(count)
        with self._changed:
            while (start := self._first_fit(size)) is None:
                if self._closed:
                    raise RunError("the run ended while host memory was waited for")
                self._changed.wait()
        if self.whole.memory is None or self.whole.tensor is None:
            return HostBlock(count, start=start)
        return HostBlock(count, self.whole.memory[start : start + size], self.whole.tensor[start : start + size], start)

    def _first_fit(self, size: int) -> int | None:
        for index, (start, stop) in enumerate(self._gaps):
            if stop - start >= size:
                self._gaps[index : index + 1] = [(start + size, stop)] if stop - start > size else []
                return start
        return None

    def give(self, block: HostBlock) -> None:
        """Take a block back. Nobody may use it any more."""
        with self._changed:
            gaps = sorted([*self._gaps, (block.start, block.start + page_aligned(block.count))])
            self._gaps = [gaps[0]]
            for start, stop in gaps[1:]:
                if start == self._gaps[-1][1]:
                    self._gaps[-1] = (self._gaps[-1][0], stop)
                else:
                    self._gaps.append((start, stop))
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing comes back any more: whoever waits, or will, is told."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class States(Protocol):
    """Where weights and states live."""

    def create(self, unit: Unit) -> None:
        """Keep a unit from the values its parameters have now."""

    def fetch(self, unit: Unit) -> list[Copy]:
        """Start copying the unit's weights to its parameters, whose storage is there. From the training thread."""

    def prefetch(self, unit: Unit) -> None:
        """The unit's states will be loaded soon."""

    def load(self, unit: Unit) -> list[Slot]:
        """The unit's weights and states in host memory. From one background thread."""

    def store(self, unit: Unit) -> None:
        """Keep what was loaded and changed."""

    def check(self) -> None:
        """Raise what a background thread ran into."""

    def settle(self) -> None:
        """Wait until all that was stored is where it belongs."""

    def close(self) -> None: ...


class HostWeights:
    """Weights in host memory for units whose states live elsewhere."""

    def __init__(self, units: Sequence[Unit], arena: Arena, link: Link) -> None:
        self.link = link
        self.blocks = {unit: arena.take(unit.layout.weight_bytes) for unit in units}

    @torch.no_grad()
    def keep(self, unit: Unit, weights: Sequence[Tensor]) -> None:
        """Take the unit's weights as they are now."""
        if self.link.simulated:
            return
        for pieces, weight in zip(unit.layout.parameters, weights, strict=True):
            self.blocks[unit].view(pieces[0].offset, pieces[0].shape, weight.dtype).copy_(weight)

    def fetch(self, unit: Unit) -> list[Copy]:
        """Start copying the unit's weights to its parameters, whose storage is there. From the training thread."""
        pairs = zip(unit.layout.parameters, unit.parameters, strict=True)
        return [self.link.up(self.blocks[unit], parameter.data, pieces[0].offset) for pieces, parameter in pairs]


class HostStates:
    """Everything stays in host memory."""

    def __init__(self, units: Sequence[Unit], arena: Arena, link: Link) -> None:
        self.link = link
        total = sum(unit.layout.total_bytes for unit in units)
        arena.reserve(total)
        self.blocks = {unit: arena.take(unit.layout.total_bytes) for unit in units}
        self.slots: dict[Unit, list[Slot]] = {}

    def create(self, unit: Unit) -> None:
        if not self.link.simulated:
            self.slots[unit] = slots_in(self.blocks[unit], unit.layout)
            fill(self.slots[unit], unit.parameters)

    def fetch(self, unit: Unit) -> list[Copy]:
        pairs = zip(unit.layout.parameters, unit.parameters, strict=True)
        return [self.link.up(self.blocks[unit], parameter.data, pieces[0].offset) for pieces, parameter in pairs]

    def prefetch(self, unit: Unit) -> None:
        return

    def load(self, unit: Unit) -> list[Slot]:
        return self.slots[unit]

    def store(self, unit: Unit) -> None:
        return

    def check(self) -> None:
        return

    def settle(self) -> None:
        return

    def close(self) -> None:
        return


class NvmeStates:
    """Everything lies in one file; host memory holds the few units that are on their way.

    Where a master copy makes the weights anew and the device keeps its own, the weights need not be stored at all.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        arena: Arena,
        link: Link,
        directory: Path,
        *,
        recipe: Recipe,
        fetched: Sequence[Unit] = (),
    ) -> None:
        """`fetched`: the units whose weights the device gets from here. Raises StorageError if there is no room."""
        simulated, serial = link.simulated, not link.overlap
        self.ledger, self.link = link.ledger, link
        total = sum(unit.layout.total_bytes for unit in units)
        if simulated:
            self.ledger.hold(self.ledger.nvme, total)
        self.derived, self.stored = recipe.master, bool(fetched) or not recipe.master
        self.reader, self.writer, self.fetcher = (
            Lane(name, serial=serial, simulated=simulated) for name in ("remat-read", "remat-write", "remat-fetch")
        )
        self.buffers = Buffers(arena, pool_bytes((unit.layout.total_bytes for unit in units), STATE_BUFFERS))
        self.staging = Buffers(arena, pool_bytes((unit.layout.weight_bytes for unit in fetched), WEIGHT_BUFFERS))
        self.reading: dict[Unit, Future[HostBlock]] = {}
        self.loaded: dict[Unit, HostBlock] = {}
        self.writing: dict[Unit, Future[None]] = {}
        # Last, so that nothing can fail between making the file and having somebody to remove it.
        self.file = None if simulated else NvmeFile(directory, total, self.ledger)

    def create(self, unit: Unit) -> None:
        if self.file is None:
            return
        block = self.buffers.take(unit.layout.total_bytes)
        fill(slots_in(block, unit.layout), unit.parameters)
        self.writing[unit] = self.writer.submit(self._write, unit, block, 0)
        self.check()

    def fetch(self, unit: Unit) -> list[Copy]:
        if self.file is None:
            self.ledger.move("read", unit.layout.weight_bytes)
        ready = torch.cuda.current_stream().record_event() if self.link.cuda else None
        return [Copy(self.fetcher.submit(self._fetch, unit, ready))]

    def prefetch(self, unit: Unit) -> None:
        if self.file is None:
            self.ledger.move("read", unit.layout.total_bytes - self._first_read(unit))
        elif self.link.overlap:
            self.reading[unit] = self.reader.submit(self._read, unit)

    def load(self, unit: Unit) -> list[Slot]:
        reading = self.reading.pop(unit, None) or self.reader.submit(self._read, unit)
        self.loaded[unit] = reading.result()
        return slots_in(self.loaded[unit], unit.layout)

    def store(self, unit: Unit) -> None:
        start = 0 if self.stored else unit.layout.weight_bytes
        if self.file is None:
            self.ledger.move("written", unit.layout.total_bytes - start)
            return
        self.writing[unit] = self.writer.submit(self._write, unit, self.loaded.pop(unit), start)

    def check(self) -> None:
        for future in list(self.writing.values()):
            if future.done():
                future.result()

    def settle(self) -> None:
        for future in list(self.writing.values()):
            future.result()

    def close(self) -> None:
        for buffers in (self.buffers, self.staging):
            buffers.close()
        for lane in (self.fetcher, self.reader, self.writer):
            lane.close()
        if self.file is not None:
            self.file.close()

    def _fetch(self, unit: Unit, ready: torch.cuda.Event | None) -> None:
        assert self.file is not None
        self._written(unit)
        block = self.staging.take(unit.layout.weight_bytes)
        try:
            self._transfer_in(unit, block, 0, unit.layout.weight_bytes)
            with torch.no_grad():
                pieces = (pieces[0] for pieces in unit.layout.parameters)
                for piece, parameter in zip(pieces, unit.parameters, strict=True):
                    source = block.view(piece.offset, piece.shape, TORCH_DTYPES[piece.dtype])
                    self.link.update(source, parameter.data, after=ready).wait()
        finally:
            self.staging.give(block)

    def _read(self, unit: Unit) -> HostBlock:
        self._written(unit)
        block = self.buffers.take(unit.layout.total_bytes)
        try:
            self._transfer_in(unit, block, self._first_read(unit), unit.layout.total_bytes)
        except BaseException:
            self.buffers.give(block)
            raise
        return block

    def _first_read(self, unit: Unit) -> int:
        return unit.layout.weight_bytes if self.derived else 0

    def _transfer_in(self, unit: Unit, block: HostBlock, start: int, stop: int) -> None:
        assert self.file is not None
        assert block.memory is not None
        self.file.read(unit.file_offset + start, block.memory[start:stop])

    def _write(self, unit: Unit, block: HostBlock, start: int) -> None:
        assert self.file is not None
        assert block.memory is not None
        try:
            self.file.write(unit.file_offset + start, block.memory[start : unit.layout.total_bytes])
        finally:
            self.buffers.give(block)

    def _written(self, unit: Unit) -> None:
        """Wait until the unit's last write is in the file."""
        if pending := self.writing.get(unit):
            pending.result()
