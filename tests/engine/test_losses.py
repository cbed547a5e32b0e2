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


def loss_and_gradients(hidden: Tensor, weight: Tensor, targets: Tensor, chunks: int) -> list[Tensor]:
    loss = cross_entropy(hidden, weight, targets, chunks=chunks)
    return [loss, *torch.autograd.grad(3.0 * loss, (hidden, weight))]


def relative_error(value: Tensor, reference: Tensor) -> float:
    return float(((value.double() - reference.double()).norm() / reference.double().norm()).detach())


def peak_bytes(chunks: int) -> int:
    """Peak of forward and backward above what was alive before, from the allocator's events."""
    hidden, weight, targets = inputs(2048, 64, 32_000)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        cross_entropy(hidden, weight, targets, chunks=chunks).backward()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("chunks", [1, 2, 7, 8, 64, 5000])
def test_any_number_of_chunks_gives_the_reference_loss_and_gradients(chunks: int) -> None:
    hidden, weight, targets = inputs(90, 16, 301)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    loss = F.cross_entropy((exact[0] @ exact[1].mT).flatten(0, 1), targets.flatten())
    reference = [loss, *torch.autograd.grad(3.0 * loss, exact)]
    for value, expected in zip(loss_and_gradients(hidden, weight, targets, chunks), reference, strict=True):
        assert relative_error(value, expected) < 1e-5


def test_bfloat16_chunks_agree_with_the_whole() -> None:
    hidden, weight, targets = inputs(128, 32, 501, torch.bfloat16)
    whole = loss_and_gradients(hidden, weight, targets, 1)
    for value, expected in zip(loss_and_gradients(hidden, weight, targets, 4), whole, strict=True):
        assert value.dtype == expected.dtype
        assert relative_error(value, expected) < 2e-2


def test_under_autocast_chunks_agree_with_the_whole() -> None:
    hidden, weight, targets = inputs(128, 32, 501)
    with torch.autocast("cpu", torch.bfloat16):
        whole = loss_and_gradients(hidden, weight, targets, 1)
        chunked = loss_and_gradients(hidden, weight, targets, 4)
    for value, expected in zip(chunked, whole, strict=True):
        assert value.dtype == expected.dtype == torch.float32
        assert relative_error(value, expected) < 2e-2


@pytest.mark.parametrize("chunks", [1, 8])
def test_what_lives_until_backward_is_two_gradients_and_a_scalar(chunks: int) -> None:
    hidden, weight, targets = inputs(64, 16, 301)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        loss = cross_entropy(hidden, weight, targets, chunks=chunks)
    assert profiler.profiler is not None
    alive = sum(event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    assert alive == hidden.nbytes + weight.nbytes + loss.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_agrees_with_standard(dtype: torch.dtype) -> None:
    hidden, weight, targets = inputs(128, 32, 501, dtype)
    standard = cross_entropy(hidden, weight, targets, fused=False)
    expected = [standard, *torch.autograd.grad(3.0 * standard, (hidden, weight))]
    for value, reference in zip(loss_and_gradients(hidden, weight, targets, 1), expected, strict=True):
        assert value.dtype == reference.dtype
        assert relative_error(value, reference) < (1e-5 if dtype == torch.float32 else 2e-2)


def test_eight_chunks_cut_the_loss_peak_at_least_threefold() -> None:
    assert peak_bytes(1) / peak_bytes(8) >= 3
