"""The offloaded optimizer on its own: clipping, and weights that get no gradient."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.offload.link import Link
from engine.offload.optimizer import OffloadedOptimizer
from engine.offload.states import HostStates, NvmeStates, make_units
from engine.offload.tiers import Arena, Ledger
from engine.optimizers import DeviceOptimizer
from engine.recipes import RECIPES

CPU, FP32 = torch.device("cpu"), RECIPES["fp32"]


@contextmanager
def offloaded(layers: nn.Sequential, directory: Any = None, **options: Any) -> Iterator[OffloadedOptimizer]:
    """One unit a layer, states in host memory or in a file."""
    ledger = Ledger()
    link, arena = Link(CPU, ledger, overlap=True), Arena(ledger, CPU)
    units = make_units([(str(i), list(layer.parameters())) for i, layer in enumerate(layers)], FP32, "adamw")
    states = NvmeStates(units, arena, link, directory, recipe=FP32) if directory else HostStates(units, arena, link)
    for unit in units:
        states.create(unit)

    def deliver(unit, slots):
        pairs = zip(slots, unit.parameters, strict=True)
        return [link.update(slot.parameter, parameter) for slot, parameter in pairs]

    optimizer = OffloadedOptimizer(
        units, states, link, arena, recipe=FP32, optimizer="adamw", deliver=deliver, **options
    )
    try:
        yield optimizer
    finally:
        for part in (optimizer, states, link):
            part.close()


def twins(make: type[nn.Module], count: int) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    ours, plain = (nn.Sequential(*(make(8, 8) for _ in range(count))) for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    return ours, plain


def test_clipping_is_torchs():
    ours, plain = twins(nn.Linear, 2)
    device = DeviceOptimizer(plain.parameters(), FP32, "adamw")
    with offloaded(ours, max_norm=0.01, order=ours.parameters()) as optimizer:
        for _ in range(3):
            x = torch.randn(4, 8)
            ours(x).square().sum().backward()
            assert all(parameter.grad is None for parameter in ours.parameters())
            optimizer.step()
            plain(x).square().sum().backward()
            assert nn.utils.clip_grad_norm_(plain.parameters(), 0.01) > 0.01
            device.step()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


class WithUnused(nn.Linear):
    """A layer one of whose weights gets no gradient, as an expert without a token."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.unused = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_unit_that_never_completes_holds_nobody_up(tier, tmp_path):
    ours, plain = twins(WithUnused, 7)
    device = DeviceOptimizer(plain.parameters(), FP32, "adamw")
    with offloaded(ours, tmp_path if tier == "nvme" else None) as optimizer:
        for _ in range(3):
            x = torch.randn(4, 8)
            for model, update in ((ours, optimizer), (plain, device)):
                model(x).square().sum().backward()
                update.step()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
