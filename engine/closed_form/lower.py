"""Bytes in the host and NVMe tiers of one device's offloaded run, laid out as `engine.offload` lays them out.

What waits in host buffers depends on timing: counted is the most that the run allows itself, an upper bound.
"""

from __future__ import annotations

from functools import lru_cache

from engine.architecture import Architecture, parameter_table
from engine.offload.layout import LANDING_BUFFERS, STATE_BUFFERS, WEIGHT_BUFFERS, UnitLayout, unit_layout
from engine.recipes import Recipe


@lru_cache(256)
def units(arch: Architecture, recipe: Recipe, optimizer: str) -> tuple[UnitLayout, UnitLayout]:
    """One block (the mean one, where blocks differ) and what is outside the blocks."""
    table = parameter_table(arch)
    block = [p.shape for p in table if p.in_block for _ in range(max(1, p.count // arch.layers))]
    rest = [p.shape for p in table if not p.in_block for _ in range(p.count)]
    return unit_layout(block, recipe, optimizer), unit_layout(rest, recipe, optimizer)


def tier_bytes(
    arch: Architecture, recipe: Recipe, optimizer: str, *, tier: str, parameters: str, few_landings: bool
) -> tuple[int, int, int]:
    """(host, NVMe, written to NVMe a step). `few_landings`: updates run beside backward."""
    block, rest = units(arch, recipe, optimizer)
    every = [block] * arch.layers + [rest]
    total = sum(unit.total_bytes for unit in every)
    landings = sorted((unit.weight_bytes for unit in every), reverse=True)
    host = sum(landings[:LANDING_BUFFERS] if few_landings else landings)
    one_call = optimizer == "adamw" and recipe.weight == recipe.moment and not recipe.master
    if not one_call and recipe.weight != "fp32":
        host += 4 * max(p.elements for p in parameter_table(arch))  # the gradient that is updated with, in fp32
    if tier == "cpu":
        return host + total, 0, 0
    host += sum(sorted((unit.total_bytes for unit in every), reverse=True)[:STATE_BUFFERS])
    if parameters == "cpu":
        host += block.weight_bytes * arch.layers
    elif parameters == "nvme":
        host += block.weight_bytes * min(WEIGHT_BUFFERS, arch.layers)
    stored = parameters == "nvme" or not recipe.master
    return host, total, total if stored else total - sum(unit.weight_bytes for unit in every)
