"""The offloaded optimizer on its own: clipping."""

import torch
from torch import nn

from engine.offload.link import Link
from engine.offload.optimizer import OffloadedOptimizer
from engine.offload.states import HostStates, make_units
from engine.offload.tiers import Arena, Ledger
from engine.optimizers import DeviceOptimizer
from engine.recipes import RECIPES

CPU = torch.device("cpu")


def test_clipping_scales_by_the_global_norm_before_any_update():
    recipe = RECIPES["fp32"]
    torch.manual_seed(0)
    ours, plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plain.load_state_dict(ours.state_dict())
    ledger = Ledger()
    link, arena = Link(CPU, ledger, overlap=True), Arena(ledger, CPU)
    units = make_units([(str(i), list(layer.parameters())) for i, layer in enumerate(ours)], recipe, "adamw")
    states = HostStates(units, arena, link)
    for unit in units:
        states.create(unit)

    def deliver(unit, slots):
        pairs = zip(slots, unit.parameters, strict=True)
        return [link.update(slot.parameter, parameter) for slot, parameter in pairs]

    offloaded = OffloadedOptimizer(
        units, states, link, arena, recipe=recipe, optimizer="adamw", deliver=deliver, max_norm=0.01
    )
    device = DeviceOptimizer(plain.parameters(), recipe, "adamw")
    for _ in range(3):
        x = torch.randn(4, 8)
        ours(x).square().sum().backward()
        assert all(parameter.grad is None for parameter in ours.parameters())
        offloaded.step()
        plain(x).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        assert norm > 0.01
        device.step()
    offloaded.close()
    link.close()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
