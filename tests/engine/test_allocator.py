"""The CUDA caching allocator's rules, each on a case small enough to work out by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.allocator import CachingAllocator, CapacityExceeded, replay, segment_bytes
from engine.trace import Recorder
from engine.units import MIB


def test_requests_are_rounded_up_to_512_bytes() -> None:
    allocator = CachingAllocator()
    assert [allocator.malloc(count).bytes for count in (1, 512, 513)] == [512, 512, 1024]
    assert allocator.allocated_bytes == 2048


@pytest.mark.parametrize(
    ("request_bytes", "segment"),
    [
        pytest.param(512, 2 * MIB, id="small pool"),
        pytest.param(1 * MIB, 2 * MIB, id="largest small"),
        pytest.param(1 * MIB + 512, 20 * MIB, id="smallest large"),
        pytest.param(10 * MIB - 512, 20 * MIB, id="just under ten"),
        pytest.param(10 * MIB, 10 * MIB, id="ten"),
        pytest.param(11 * MIB, 12 * MIB, id="odd megabytes"),
    ],
)
def test_segments_asked_of_the_driver(request_bytes: int, segment: int) -> None:
    assert segment_bytes(request_bytes) == segment
    allocator = CachingAllocator()
    allocator.malloc(request_bytes)
    assert allocator.reserved_bytes == segment


def test_a_small_segment_is_split_and_shared() -> None:
    allocator = CachingAllocator()
    first, second = allocator.malloc(1 * MIB), allocator.malloc(1 * MIB)
    assert (second.address - first.address, allocator.reserved_bytes) == (1 * MIB, 2 * MIB)


def test_a_large_block_is_split_only_if_more_than_a_mebibyte_is_left() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(19 * MIB)  # a segment of its own: 20 MiB, 1 MiB over
    assert block.bytes == 20 * MIB
    assert CachingAllocator().malloc(9 * MIB).bytes == 9 * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    wide, narrow = allocator.malloc(30 * MIB), allocator.malloc(12 * MIB)
    address = narrow.address
    allocator.free(wide)
    allocator.free(narrow)
    assert allocator.malloc(12 * MIB).address == address
    assert allocator.reserved_bytes == 42 * MIB


def test_free_neighbours_merge() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(5 * MIB) for _ in range(4)]  # one 20 MiB segment
    for block in (blocks[0], blocks[2], blocks[1]):
        allocator.free(block)
    assert allocator.malloc(15 * MIB).address == 0
    assert allocator.reserved_bytes == 20 * MIB


def test_blocks_of_two_segments_do_not_merge() -> None:
    allocator = CachingAllocator()
    for block in [allocator.malloc(10 * MIB) for _ in range(2)]:
        allocator.free(block)
    allocator.malloc(20 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_a_full_device_gives_the_cache_back_and_tries_again() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    allocator.malloc(40 * MIB)
    assert (allocator.reserved_bytes, allocator.retries) == (40 * MIB, 1)


def test_a_segment_in_use_is_not_given_back() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    rest = allocator.malloc(15 * MIB)
    allocator.malloc(4 * MIB)
    allocator.free(rest)
    with pytest.raises(CapacityExceeded):
        allocator.malloc(30 * MIB)


def test_expandable_segments_grow_instead_of_fragmenting() -> None:
    def reserved(expandable: bool) -> int:
        allocator = CachingAllocator(expandable_segments=expandable)
        for block in [allocator.malloc(20 * MIB) for _ in range(2)]:
            allocator.free(block)
        allocator.malloc(60 * MIB)
        return allocator.reserved_bytes

    assert (reserved(False), reserved(True)) == (100 * MIB, 60 * MIB)


def test_an_expandable_segment_gives_back_whole_pages_of_its_free_end() -> None:
    allocator = CachingAllocator(expandable_segments=True, capacity_bytes=62 * MIB)
    allocator.malloc(10 * MIB)
    allocator.free(allocator.malloc(45 * MIB))  # 60 MiB in pages of 20; 50 MiB of them free
    for _ in range(4):
        allocator.malloc(1 * MIB)  # two small pages of 2 MiB do not fit beside them
    assert (allocator.reserved_bytes, allocator.retries) == (24 * MIB, 1)


def step_of(sizes: list[int]) -> Recorder:
    """Allocate all, free every other, allocate all again, and leave the rest to the step's end."""
    recorder, clock = Recorder(), iter(range(1, 10_000))
    recorder.phase("forward", next(clock), True)
    for index, size in enumerate(sizes):
        recorder.allocate(index, size, next(clock))
    for index in range(0, len(sizes), 2):
        recorder.free(index, next(clock))
    for index, size in enumerate(sizes):
        recorder.allocate(f"again {index}", size, next(clock))
    recorder.phase("forward", next(clock), False)
    return recorder


@given(
    sizes=st.lists(st.integers(1, 40 * MIB), min_size=1, max_size=30),
    base=st.lists(st.integers(1, 30 * MIB), max_size=5),
    expandable=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_a_replay_reserves_at_least_what_is_alive(sizes: list[int], base: list[int], expandable: bool) -> None:
    trace = step_of(sizes).finish({"parameters": sum(base)}, "events")
    once = replay(base, [trace], expandable_segments=expandable)
    assert trace.peak()[1] <= once.allocated_peak_bytes <= once.reserved_peak_bytes
    assert 0 <= once.fragmentation < 1
    enough = replay(base, [trace, trace], expandable_segments=expandable, capacity_bytes=once.reserved_peak_bytes * 4)
    assert enough.fits
    assert not replay(base, [trace], capacity_bytes=once.allocated_peak_bytes - 1).fits


def test_a_second_equal_step_reserves_no_more() -> None:
    trace = step_of([30 * MIB, 3 * MIB, 512]).finish({}, "events")
    assert replay([], [trace]).reserved_peak_bytes == replay([], [trace, trace]).reserved_peak_bytes
