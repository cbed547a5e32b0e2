from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from engine.attention import Kernel, select_kernel
from engine.errors import UnsupportedError
from engine.spec import Attention

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def select(name: Attention, device: torch.device = CPU, **fields: object) -> Kernel:
    options = {"dtype": torch.bfloat16, "head_dim": 64, "dropout": 0.0, **fields}
    return select_kernel(name, device=device, **options)  # type: ignore[arg-type]  # a table of options


@pytest.mark.parametrize(
    ("name", "device", "fields", "runs", "note"),
    [
        ("standard", CPU, {"dropout": 0.1}, "standard", ""),
        ("flash", CPU, {}, "sdpa-flash-cpu", ""),
        ("flash", CPU, {"dropout": 0.1}, "standard", "no dropout"),
        ("flash", CUDA, {"dropout": 0.1}, "sdpa-flash", ""),
        ("flash", CUDA, {"dtype": torch.float32}, "sdpa-efficient", "fp16 and bf16 only"),
        ("flash", CUDA, {"head_dim": 512}, "standard", "at most 256, not 512"),
        ("tiled", CPU, {}, "tiled", ""),
        ("tiled", CUDA, {}, "tiled", ""),
        ("tiled", CPU, {"dropout": 0.1}, "standard", "no dropout"),
    ],
)
def test_the_kernel_that_runs_is_named_and_a_fall_back_has_its_reason(
    name: Attention, device: torch.device, fields: dict[str, object], runs: str, note: str
) -> None:
    kernel = select(name, device, **fields)
    assert kernel.name == runs
    assert bool(kernel.note) == bool(note)
    assert note in kernel.note


def test_triton_without_cuda_says_so() -> None:
    with pytest.raises(UnsupportedError, match="needs a CUDA device"):
        select("triton")


@pytest.mark.parametrize("past", [0, 5])
def test_flash_dispatches_the_fused_operator_forward_and_backward(past: int) -> None:
    q, k = torch.randn(1, 4, 16, 8, requires_grad=True), torch.randn(1, 2, 16 + past, 8, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        select("flash", dtype=torch.float32)(q, k, k).sum().backward()
    ran = {event.name for event in profiler.events() or []}
    assert {
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    } <= ran
    assert not any("softmax" in name for name in ran)
