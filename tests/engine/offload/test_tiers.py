"""Byte accounting of the tiers, and that host memory is outside torch's and the limit's sight."""

import itertools
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from engine.errors import RunError
from engine.offload.layout import pool_bytes
from engine.offload.states import Buffers
from engine.offload.tiers import PAGE_BYTES, Arena, HostBlock, Ledger, page_aligned
from engine.units import MIB

CPU = torch.device("cpu")


@given(sizes=st.lists(st.integers(1, 3 * PAGE_BYTES), min_size=1, max_size=20), data=st.data())
@settings(max_examples=20, deadline=None)
def test_now_is_what_is_out_and_peak_the_most_that_ever_was(sizes, data):
    ledger = Ledger()
    arena = Arena(ledger, CPU)
    arena.reserve(2 * PAGE_BYTES)
    out, peak = [], 0
    for size in sizes:
        block = arena.take(size)
        block.view(0, (size,), torch.uint8).fill_(len(out) % 251)
        out.append((block, len(out) % 251))
        peak = max(peak, sum(taken.count for taken, _ in out))
        assert ledger.host.now_bytes == sum(taken.count for taken, _ in out)
        if data.draw(st.booleans()):
            arena.give(out.pop(data.draw(st.integers(0, len(out) - 1)))[0])
    assert ledger.host.peak_bytes == peak
    for block, mark in out:  # no two blocks share memory
        assert set(block.view(0, (block.count,), torch.uint8).tolist()) == {mark}


def test_a_returned_block_is_reused():
    arena = Arena(Ledger(), CPU)
    block = arena.take(10_000)
    address = block.tensor.data_ptr()
    arena.give(block)
    assert arena.take(9_000).tensor.data_ptr() == address


@given(sizes=st.lists(st.integers(1, 3 * PAGE_BYTES), min_size=1, max_size=20), data=st.data())
@settings(max_examples=20, deadline=None)
def test_blocks_of_a_pool_never_overlap_and_all_of_it_comes_back(sizes, data):
    ledger = Ledger()
    pool = Buffers(Arena(ledger, CPU), pool_bytes(sizes, 3))
    out: list[HostBlock] = []
    for size in sizes:
        while len(out) == 3 or (out and data.draw(st.booleans())):
            pool.give(out.pop(data.draw(st.integers(0, len(out) - 1))))
        try_fit = sum(page_aligned(block.count) for block in out) + page_aligned(size)
        if not out or try_fit <= PAGE_BYTES:
            out.append(pool.take(size))
        spans = sorted((block.start, block.start + page_aligned(block.count)) for block in out)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    for block in out:
        pool.give(block)
    assert pool.take(pool_bytes(sizes, 3)).start == 0
    assert ledger.host.peak_bytes == pool_bytes(sizes, 3)


def test_who_waits_for_room_gets_it_or_hears_of_the_end():
    pool = Buffers(Arena(Ledger(), CPU), 2 * PAGE_BYTES)
    first, second = pool.take(PAGE_BYTES), pool.take(1)
    with ThreadPoolExecutor(1) as lane:
        waiting = lane.submit(pool.take, PAGE_BYTES)
        pool.give(first)
        assert waiting.result(timeout=5).start == first.start
        waiting = lane.submit(pool.take, 2 * PAGE_BYTES)
        pool.give(second)
        pool.close()
        with pytest.raises(RunError, match="the run ended"):
            waiting.result(timeout=5)


def test_views_have_dtype_shape_and_offset():
    block = Arena(Ledger(), CPU).take(PAGE_BYTES)
    block.view(64, (2, 3), torch.float32).copy_(torch.arange(6.0).view(2, 3))
    assert block.view(64 + 12, (3,), torch.float32).tolist() == [3.0, 4.0, 5.0]


def test_the_profiler_does_not_see_host_memory():
    arena = Arena(Ledger(), CPU)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        arena.take(8 * MIB).view(0, (8 * MIB,), torch.uint8).zero_()
    events = profiler.profiler.kineto_results.events()
    assert not [event for event in events if event.name() == "[memory]" and abs(event.nbytes()) >= MIB]


def test_the_data_limit_does_not_see_host_memory():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    held = int(status["VmData"].split()[0]) * 1024
    arena = Arena(Ledger(), CPU)
    resource.setrlimit(resource.RLIMIT_DATA, (held + 64 * MIB, before[1]))
    try:
        arena.take(256 * MIB)
        with pytest.raises(RuntimeError, match="allocate memory"):
            torch.empty(256 * MIB, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def test_the_ledger_counts_from_many_threads():
    ledger = Ledger()
    threads = [
        threading.Thread(target=lambda: [ledger.move("up", 1) for _ in range(1000)], name=str(n)) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.moved["up"] == 4000
