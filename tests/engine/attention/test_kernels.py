"""Every kernel against the formula in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.attention import Kernel, select_kernel
from engine.spec import Attention

CPU = torch.device("cpu")
KERNELS: tuple[Attention, ...] = ("standard", "flash", "tiled")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def kernel(name: Attention, dtype: torch.dtype = torch.float32) -> Kernel:
    return select_kernel(name, device=CPU, dtype=dtype, head_dim=64, dropout=0.0)


def formula(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """softmax(q·kᵀ/√D)·v with K and V repeated for every query head."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v


def projected(heads: int, rows: int, batch: int, width: int, generator: torch.Generator) -> Tensor:
    """(B, heads, rows, D) float64 lying as a projection leaves it: (B, rows, heads, D)."""
    return torch.randn(batch, rows, heads, width, generator=generator, dtype=torch.float64).transpose(1, 2)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    queries = draw(st.one_of(st.integers(1, 40), st.sampled_from([127, 255, 256, 257, 300])))
    return {
        "batch": draw(st.integers(1, 3)),
        "kv_heads": draw(st.sampled_from([1, 2, 3, 9])),
        "groups": draw(st.sampled_from([1, 2, 4])),
        "queries": queries,
        "past": draw(st.sampled_from([0, 0, 1, 37, 260])),
        "width": draw(st.one_of(st.integers(1, 16), st.sampled_from([33, 64, 80, 256]))),
        "causal": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=20, deadline=None)
@given(problem=problems())
def test_output_and_gradients_agree_with_float64(name: Attention, dtype: torch.dtype, problem: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(problem["seed"])
    batch, kv_heads, queries, width = (problem[key] for key in ("batch", "kv_heads", "queries", "width"))
    heads, keys = kv_heads * problem["groups"], queries + problem["past"]
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries))
    q, k, v, upstream = (projected(*size, batch, width, generator).to(dtype) for size in sizes)

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = formula(*exact, problem["causal"])
    gradients = torch.autograd.grad(expected, exact, upstream.double())

    inputs = [x.requires_grad_() for x in (q, k, v)]
    output = kernel(name, dtype)(*inputs, causal=problem["causal"])
    assert output.dtype == dtype
    scale = max(float(x.norm()) for x in gradients)  # what is 0 in exact arithmetic has no relative error
    for value, reference in zip(
        (output, *torch.autograd.grad(output, inputs, upstream)), (expected, *gradients), strict=True
    ):
        assert value.shape == reference.shape
        size = max(float(reference.detach().norm()), 0.1 * scale)
        assert float((value.detach().double() - reference.detach()).norm()) <= TOLERANCE[dtype] * size


@pytest.mark.parametrize("name", KERNELS)
def test_under_autocast_every_kernel_runs_in_bfloat16(name: Attention) -> None:
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = kernel(name)(q, q, q.to(torch.bfloat16))
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("name", KERNELS)
def test_fake_tensors_get_the_real_shapes_and_strides(name: Attention) -> None:
    def run() -> list[tuple[torch.Size, tuple[int, ...]]]:
        q, k = (torch.empty(2, 12, heads, 8).transpose(1, 2).requires_grad_() for heads in (4, 2))
        output = kernel(name)(q, k, k)
        return [(x.shape, x.stride()) for x in (output, *torch.autograd.grad(output.sum(), (q, k)))]

    with FakeTensorMode():
        fake = run()
    assert fake == run()


@pytest.mark.parametrize("name", KERNELS)
def test_queries_that_would_see_nothing_are_refused(name: Attention) -> None:
    with pytest.raises(ValueError, match="5 causal queries over 3 keys"):
        kernel(name)(torch.ones(1, 2, 5, 8), torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8))


@pytest.mark.parametrize("name", KERNELS)
def test_heads_that_do_not_divide_are_refused(name: Attention) -> None:
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2"):
        kernel(name)(torch.ones(1, 3, 5, 8), torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 8))


def test_large_scores_do_not_overflow() -> None:
    q = 1e4 * torch.randn(1, 2, 300, 16)
    for name in KERNELS:
        torch.testing.assert_close(
            kernel(name)(q, q, q), formula(*(x.double() for x in (q, q, q)), True).float(), rtol=1e-4, atol=1e-1
        )


def test_tiled_in_float64_passes_gradcheck() -> None:
    q, k, v = (torch.randn(1, heads, 5, 3, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    assert torch.autograd.gradcheck(lambda *x: kernel("tiled")(*x), (q, k, v))


def test_dropout_zeroes_probabilities_and_keeps_their_mean() -> None:
    torch.manual_seed(0)
    q = torch.zeros(1, 4, 256, 1)
    output = select_kernel("standard", device=CPU, dtype=torch.float32, head_dim=1, dropout=0.25)(
        q, q, torch.ones(1, 4, 256, 1), causal=False, dropout=0.25
    )
    assert float(output.mean()) == pytest.approx(1.0, abs=0.02)
    assert float(output.std()) > 0.01
