"""Byte accounting of the tiers, and that host memory is outside torch's and the limit's sight."""

import resource
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from engine.offload.tiers import PAGE_BYTES, Arena, Ledger
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
