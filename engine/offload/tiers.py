"""The tiers below the device: how many bytes each holds, and the host memory itself.

The host tier is an arena of shared anonymous mappings. Neither torch's allocators nor RLIMIT_DATA count them, so a
device peak on a CPU is the device's alone, and a cap on the device does not cap the host. With a CUDA device the same
mappings are page-locked, at their exact size (torch's pinned allocator rounds up to a power of two).
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.errors import RunError
from engine.units import format_bytes

PAGE_BYTES = 4096
"""O_DIRECT wants offsets, lengths and addresses in logical blocks; every disk's divides a page."""


def page_aligned(count: int) -> int:
    """`count` rounded up to whole pages."""
    return -(-count // PAGE_BYTES) * PAGE_BYTES


@dataclass
class TierUsage:
    """Bytes one tier holds now and held at most."""

    now_bytes: int = 0
    peak_bytes: int = 0

    def change(self, count: int) -> None:
        self.now_bytes += count
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)


@dataclass
class Ledger:
    """What the tiers of one run hold and what moved between them. Safe to use from any thread."""

    host: TierUsage = field(default_factory=TierUsage)
    nvme: TierUsage = field(default_factory=TierUsage)
    moved: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Bytes by direction: `down` device to host, `up` host to device, `read` and `written` for files."""
    stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    """Before and after each wait of the CUDA compute stream for a copy."""
    _exposed_seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hold(self, tier: TierUsage, count: int) -> None:
        with self._lock:
            tier.change(count)

    def move(self, direction: str, count: int) -> None:
        with self._lock:
            self.moved[direction] += count

    def waited(self, seconds: float) -> None:
        """Compute waited for a transfer. For the training thread only."""
        self._exposed_seconds += seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts its body as time that compute waited for a transfer. For the training thread only."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.waited(time.perf_counter() - start)

    def exposed(self) -> float:
        """Seconds so far that compute waited for transfers. Waits for the device."""
        for before, after in self.stalls:
            after.synchronize()
            self.waited(before.elapsed_time(after) / 1e3)
        self.stalls.clear()
        return self._exposed_seconds


@dataclass(eq=False, slots=True)
class HostBlock:
    """A piece of host memory. Without an arena behind it (a simulated run) it only has a size."""

    count: int
    memory: memoryview | None = None
    tensor: Tensor | None = None
    start: int = 0
    """Its place in the larger block that it was cut from."""

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor at `offset`, sharing this block's memory."""
        assert self.tensor is not None
        count = dtype.itemsize
        for size in shape:
            count *= size
        return self.tensor[offset : offset + count].view(dtype).view(shape)


class Arena:
    """Hands out host memory and takes it back; freed blocks wait for a request of the same size.

    A step asks for the same sizes every time, so from the second step on nothing is mapped or page-locked.
    """

    def __init__(self, ledger: Ledger, device: torch.device, *, simulated: bool = False) -> None:
        self.ledger = ledger
        self.pinned = device.type == "cuda" and not simulated
        self.simulated = simulated
        self._free: dict[int, list[HostBlock]] = defaultdict(list)
        self._slab = HostBlock(0)
        self._slab_used = 0
        self._lock = threading.Lock()

    def reserve(self, count: int) -> None:
        """Map (and page-lock) `count` bytes at once; the next blocks are cut from them."""
        if not self.simulated:
            self._slab, self._slab_used = self._map(page_aligned(count)), 0

    def take(self, count: int) -> HostBlock:
        """A block of `count` bytes at a page boundary; its content is whatever was there."""
        self.ledger.hold(self.ledger.host, count)
        if self.simulated:
            return HostBlock(count)
        with self._lock:
            waiting = self._free[page_aligned(count)]
            block = waiting.pop() if waiting else self._cut(page_aligned(count))
        block.count = count
        return block

    def give(self, block: HostBlock) -> None:
        """Take a block back. Nobody may use it any more."""
        self.ledger.hold(self.ledger.host, -block.count)
        if not self.simulated:
            with self._lock:
                self._free[page_aligned(block.count)].append(block)

    def _cut(self, count: int) -> HostBlock:
        slab, start = self._slab, self._slab_used
        if start + count > slab.count:
            return self._map(count)
        self._slab_used += count
        assert slab.memory is not None
        assert slab.tensor is not None
        return HostBlock(count, slab.memory[start : start + count], slab.tensor[start : start + count])

    def _map(self, count: int) -> HostBlock:
        try:
            mapping = mmap.mmap(-1, max(count, PAGE_BYTES))
        except OSError as error:
            raise RunError(f"the host tier could not map {format_bytes(count)}: {error.strerror}") from error
        tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        if self.pinned:
            status = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
            if int(status) != 0:
                raise RunError(f"the host tier could not page-lock {format_bytes(count)}: CUDA error {int(status)}")
        return HostBlock(count, memoryview(mapping), tensor)
