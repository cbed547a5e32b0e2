"""What attention keeps and what it takes at its peak, from the allocator's own events."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from engine.attention import select_kernel
from engine.spec import Attention

CPU = torch.device("cpu")
LENGTHS = (512, 1024, 2048, 4096)


def projections(batch: int, heads: int, kv_heads: int, seq: int, width: int) -> list[Tensor]:
    return [torch.randn(batch, seq, n, width).transpose(1, 2).requires_grad_() for n in (heads, kv_heads, kv_heads)]


def saved(name: Attention, inputs: list[Tensor], dropout: float = 0.0) -> dict[int, Tensor]:
    """Distinct storages that autograd holds, by address."""
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    kernel = select_kernel(name, device=CPU, dtype=inputs[0].dtype, head_dim=inputs[0].shape[-1], dropout=dropout)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = kernel(*inputs, dropout=dropout)
    assert output.grad_fn is not None
    return kept


def peak_bytes(name: Attention, heads: int, seq: int) -> int:
    """Most bytes alive above the inputs in a forward and backward of heads of 64."""
    inputs = projections(1, heads, heads, seq, 64)
    kernel = select_kernel(name, device=CPU, dtype=torch.float32, head_dim=64, dropout=0.0)
    upstream = torch.ones_like(inputs[0])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        kernel(*inputs).backward(upstream)
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def slope(lengths: tuple[int, ...], sizes: list[int]) -> float:
    """Least-squares slope on log-log axes."""
    x, y = [math.log(n) for n in lengths], [math.log(n) for n in sizes]
    centre = sum(x) / len(x)
    return sum((a - centre) * b for a, b in zip(x, y, strict=True)) / sum((a - centre) ** 2 for a in x)


@pytest.mark.parametrize("name", ["tiled", "flash"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_flash_kernels_save_q_k_v_output_and_one_fp32_number_a_row(name: Attention, kv_heads: int) -> None:
    q, k, v = projections(2, 4, kv_heads, 300, 24)
    kept = saved(name, [q, k, v])
    rows, expected = 2 * 4 * 300, [q.nbytes, k.nbytes, v.nbytes, q.nbytes]
    assert sorted(x.untyped_storage().nbytes() for x in kept.values()) == sorted([*expected, 4 * rows])
    assert {x.untyped_storage().data_ptr() for x in (q, k, v)} <= set(kept)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_standard_saves_exactly_what_its_table_says(dropout: float) -> None:
    q, k, v = projections(2, 4, 2, 64, 8)
    scores = 2 * 4 * 64 * 64
    expected = [q.nbytes, k.nbytes, v.nbytes, 4 * scores] + ([scores, 4 * scores] if dropout else [])
    kept = saved("standard", [q, k, v], dropout)
    assert sorted(x.untyped_storage().nbytes() for x in kept.values()) == sorted(expected)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "heads", "expected"), [("standard", 2, 2), ("tiled", 8, 1), ("flash", 8, 1)])
def test_peak_against_length_has_the_slope_of_its_kind(name: Attention, heads: int, expected: int) -> None:
    peaks = [peak_bytes(name, heads, seq) for seq in LENGTHS]
    assert slope(LENGTHS, peaks) == pytest.approx(expected, abs=0.1), peaks
