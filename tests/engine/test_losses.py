from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from engine.losses import cross_entropy


def inputs(tokens: int, width: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, tokens // 2, width, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, width, generator=generator).mul_(width**-0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(vocab, (2, tokens // 2), generator=generator)


def loss_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunks: int = 1, fused: bool = True
) -> list[Tensor]:
    loss = cross_entropy(hidden, weight, targets, chunks=chunks, fused=fused)
    return [loss, *torch.autograd.grad(3.0 * loss, (hidden, weight))]


def relative_error(value: Tensor, reference: Tensor) -> float:
    return float(((value.double() - reference.double()).norm() / reference.double().norm()).detach())


def peak_bytes(chunks: int, fused: bool = True) -> int:
    """Peak of forward and backward above what was alive before, from the allocator's events."""
    hidden, weight, targets = inputs(2048, 64, 32_000)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        cross_entropy(hidden, weight, targets, chunks=chunks, fused=fused).backward()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def reference(hidden: Tensor, weight: Tensor, targets: Tensor) -> list[Tensor]:
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    loss = F.cross_entropy((exact[0] @ exact[1].mT).flatten(0, 1), targets.flatten())
    return [loss, *torch.autograd.grad(3.0 * loss, exact)]


@pytest.mark.parametrize("chunks", [1, 2, 7, 8, 64, 5000])
def test_fused_in_any_number_of_chunks_is_exact(chunks: int) -> None:
    batch = inputs(90, 16, 301)
    for value, expected in zip(loss_and_gradients(*batch, chunks), reference(*batch), strict=True):
        assert relative_error(value, expected) < 1e-5


def test_standard_is_exact() -> None:
    batch = inputs(90, 16, 301)
    for value, expected in zip(loss_and_gradients(*batch, fused=False), reference(*batch), strict=True):
        assert relative_error(value, expected) < 1e-5


@pytest.mark.parametrize("chunks", [1, 4])
def test_bfloat16_agrees_with_the_standard_loss(chunks: int) -> None:
    batch = inputs(128, 32, 501, torch.bfloat16)
    for value, expected in zip(
        loss_and_gradients(*batch, chunks), loss_and_gradients(*batch, fused=False), strict=True
    ):
        assert value.dtype == expected.dtype
        assert relative_error(value, expected) < 2e-2


@pytest.mark.parametrize("chunks", [1, 4])
def test_autocast_agrees_with_the_standard_loss(chunks: int) -> None:
    batch = inputs(128, 32, 501)
    with torch.autocast("cpu", torch.bfloat16):
        standard = loss_and_gradients(*batch, fused=False)
        fused = loss_and_gradients(*batch, chunks)
    for value, expected in zip(fused, standard, strict=True):
        assert value.dtype == expected.dtype == torch.float32
        assert relative_error(value, expected) < 2e-2


def test_fused_keeps_two_gradients_and_no_logits() -> None:
    hidden, weight, targets = inputs(64, 16, 301)
    loss = cross_entropy(hidden, weight, targets, chunks=2)
    kept = [x.shape for x in loss.grad_fn.gradients]
    assert kept == [hidden.shape, weight.shape]


@pytest.mark.slow
def test_eight_chunks_cut_the_loss_peak_at_least_threefold() -> None:
    chunked = peak_bytes(8)
    assert peak_bytes(1) >= 3 * chunked
    assert peak_bytes(1, fused=False) >= 9 * chunked
