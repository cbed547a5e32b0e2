"""torch's CUDA caching allocator, replayed: what a trace of allocations and frees makes it reserve. Torch-free.

Rules and constants of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h (torch 2.13), one stream:

- a request is rounded up to 512 B; at most 1 MiB goes to the small pool, the rest to the large one;
- the smallest cached block that holds it is taken (ties: lowest address), and split where enough is left over;
- without one, a segment is asked of the driver: 2 MiB (small pool), 20 MiB (requests under 10 MiB), else the request
  rounded up to 2 MiB;
- a freed block merges with its free neighbours in the segment;
- when the driver refuses, every segment that is wholly free is given back and the request is tried again;
- with `expandable_segments`, each pool is one segment that grows at its end by pages of 2 or 20 MiB.

Not modelled: blocks held back for other streams, private pools of CUDA graphs, `max_split_size_mb`, and the few
microseconds-old blocks that garbage collection would take.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.trace import Trace
from engine.units import MIB

MIN_BLOCK_BYTES = 512
SMALL_BYTES = 1 * MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_LARGE_BYTES = 10 * MIB
ROUND_LARGE_BYTES = 2 * MIB


class CapacityExceeded(Exception):
    """The device cannot hold a request even after every cached segment was given back."""


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment. Neighbours in the segment are linked."""

    address: int
    bytes: int
    small: bool
    allocated: bool = False
    before: Block | None = None
    after: Block | None = None


@dataclass(slots=True)
class Pool:
    """The cached (free) blocks of one size class, ordered by size, then address."""

    small: bool
    order: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)
    tail: Block | None = None
    """The block at the growing end, with expandable segments."""

    def add(self, block: Block) -> None:
        bisect.insort(self.order, (block.bytes, block.address))
        self.blocks[block.address] = block

    def remove(self, block: Block) -> None:
        del self.order[bisect.bisect_left(self.order, (block.bytes, block.address))]
        del self.blocks[block.address]

    def best_fit(self, count: int, expandable: bool) -> Block | None:
        """The smallest block of at least `count` bytes. The block at a growing end counts as the largest of all."""
        for _, address in self.order[bisect.bisect_left(self.order, (count, 0)) :]:
            block = self.blocks[address]
            if not expandable or block is not self.tail:
                return block
        fits = self.tail is not None and not self.tail.allocated and self.tail.bytes >= count
        return self.tail if expandable and fits else None


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a replay came to."""

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    reserved_bytes_at_end: int
    retries: int
    """How often the driver refused and the cache was given back: a run with retries is slow."""
    fits: bool

    @property
    def fragmentation(self) -> float:
        """Share of the reserved peak that the allocated peak leaves unused."""
        return 1 - self.allocated_peak_bytes / self.reserved_peak_bytes if self.reserved_peak_bytes else 0.0


class CachingAllocator:
    """`malloc` and `free` as torch's allocator serves them. `capacity_bytes` is what the driver has to give."""

    def __init__(self, *, expandable_segments: bool = False, capacity_bytes: int | None = None) -> None:
        self.expandable = expandable_segments
        self.capacity_bytes = capacity_bytes
        self.pools = {small: Pool(small) for small in (True, False)}
        self.next_address = 0
        self.allocated_bytes = self.reserved_bytes = 0
        self.allocated_peak_bytes = self.reserved_peak_bytes = 0
        self.retries = 0

    def malloc(self, count: int) -> Block:
        """A block for a request of `count` bytes (≥ 1). Raises CapacityExceeded."""
        wanted = round_up(max(count, 1), MIN_BLOCK_BYTES)
        pool = self.pools[wanted <= SMALL_BYTES]
        block = pool.best_fit(wanted, self.expandable)
        if block is not None:
            pool.remove(block)
        else:
            block = self._extend(pool, wanted)
        self._split(pool, block, wanted)
        block.allocated = True
        self.allocated_bytes += block.bytes
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Back to the cache, merged with its free neighbours."""
        pool = self.pools[block.small]
        block.allocated = False
        self.allocated_bytes -= block.bytes
        if (left := block.before) is not None and not left.allocated:
            pool.remove(left)
            block = self._join(pool, left, block)
        if (right := block.after) is not None and not right.allocated:
            pool.remove(right)
            block = self._join(pool, block, right)
        pool.add(block)

    def release_cached(self) -> None:
        """Give every wholly free segment back to the driver (of a growing segment: the whole pages at its free end)."""
        for pool in self.pools.values():
            if self.expandable:
                self._shrink(pool)
                continue
            for block in [b for b in pool.blocks.values() if b.before is None and b.after is None]:
                pool.remove(block)
                self.reserved_bytes -= block.bytes

    def _extend(self, pool: Pool, wanted: int) -> Block:
        """A free block of at least `wanted` bytes on memory new from the driver; it is in no pool's list."""
        if not self.expandable:
            size = segment_bytes(wanted)
            self._reserve(size)
            block = Block(self.next_address, size, pool.small)
            self.next_address += round_up(size, ROUND_LARGE_BYTES)
            return block
        page = SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES
        missing = self._missing(pool, wanted)
        self._reserve(round_up(missing, page), pool, wanted, page)
        tail = pool.tail
        grown = round_up(self._missing(pool, wanted), page)  # giving back may have taken some of the free end
        if tail is not None and not tail.allocated and tail.address in pool.blocks:
            pool.remove(tail)
            tail.bytes += grown
            return tail
        address = tail.address + tail.bytes if tail is not None else (0 if pool.small else 2**50)
        block = Block(address, grown, pool.small, before=tail)
        if tail is not None:
            tail.after = block
        pool.tail = block
        return block

    def _missing(self, pool: Pool, wanted: int) -> int:
        free_end = pool.tail.bytes if pool.tail is not None and not pool.tail.allocated else 0
        return wanted - free_end

    def _reserve(self, count: int, pool: Pool | None = None, wanted: int = 0, page: int = 0) -> None:
        """Take `count` bytes from the driver, giving the cache back first if it has not that much left."""
        if self.capacity_bytes is not None and self.reserved_bytes + count > self.capacity_bytes:
            self.retries += 1
            self.release_cached()
            if pool is not None:
                count = round_up(self._missing(pool, wanted), page)
            if self.reserved_bytes + count > self.capacity_bytes:
                raise CapacityExceeded(f"{count} bytes asked for, {self.capacity_bytes - self.reserved_bytes} left")
        self.reserved_bytes += count
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)

    def _split(self, pool: Pool, block: Block, wanted: int) -> None:
        """Cut what is left over from a block, where the allocator would."""
        left_over = block.bytes - wanted
        if left_over < MIN_BLOCK_BYTES or (not pool.small and not self.expandable and left_over <= SMALL_BYTES):
            return
        rest = Block(block.address + wanted, left_over, block.small, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.bytes = rest, wanted
        if pool.tail is block:
            pool.tail = rest
        pool.add(rest)

    @staticmethod
    def _join(pool: Pool, left: Block, right: Block) -> Block:
        left.bytes += right.bytes
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        if pool.tail is right:
            pool.tail = left
        return left

    def _shrink(self, pool: Pool) -> None:
        tail = pool.tail
        if tail is None or tail.allocated:
            return
        page = SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES
        given_back = tail.bytes // page * page
        pool.remove(tail)
        tail.bytes -= given_back
        self.reserved_bytes -= given_back
        if tail.bytes:
            pool.add(tail)
        else:
            pool.tail = tail.before
            if tail.before is not None:
                tail.before.after = None


def round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def segment_bytes(wanted: int) -> int:
    """What is asked of the driver for a rounded request."""
    if wanted <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if wanted < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return round_up(wanted, ROUND_LARGE_BYTES)


def replay(
    base_storages: Iterable[int],
    steps: Iterable[Trace],
    *,
    expandable_segments: bool = False,
    capacity_bytes: int | None = None,
) -> Footprint:
    """Allocate `base_storages` (bytes each: parameters, optimizer states) for good, then run the steps in order.

    What a step leaves alive dies when it returns, as Python's references do.
    """
    allocator = CachingAllocator(expandable_segments=expandable_segments, capacity_bytes=capacity_bytes)
    fits = True
    try:
        for count in base_storages:
            allocator.malloc(count)
        for trace in steps:
            _replay_step(allocator, trace)
    except CapacityExceeded:
        fits = False
    return Footprint(
        allocator.allocated_peak_bytes, allocator.reserved_peak_bytes, allocator.reserved_bytes, allocator.retries, fits
    )


def _replay_step(allocator: CachingAllocator, trace: Trace) -> None:
    blocks: dict[int, Block] = {}
    for _, storage, sign in trace.events():
        if storage.bytes == 0:
            continue
        if sign > 0:
            blocks[id(storage)] = allocator.malloc(storage.bytes)
        else:
            allocator.free(blocks.pop(id(storage)))
    for block in blocks.values():
        allocator.free(block)
