"""Bytes in the host and NVMe tiers of one device's offloaded run, laid out as `engine.offload` lays them out."""

from __future__ import annotations

from functools import lru_cache

from engine.architecture import Architecture, parameter_table
from engine.offload.layout import (
    STATE_BUFFERS,
    WEIGHT_BUFFERS,
    UnitLayout,
    addend_bytes,
    landing_bytes,
    pool_bytes,
    unit_layout,
)
from engine.recipes import DTYPE_BYTES, Recipe


@lru_cache(256)
def units(arch: Architecture, recipe: Recipe, optimizer: str) -> tuple[UnitLayout, UnitLayout]:
    """One block (the mean one, where blocks differ) and what is outside the blocks."""
    table = parameter_table(arch)
    block = [p.shape for p in table if p.in_block for _ in range(max(1, p.count // arch.layers))]
    rest = [p.shape for p in table if not p.in_block for _ in range(p.count)]
    return unit_layout(block, recipe, optimizer), unit_layout(rest, recipe, optimizer)


def tier_bytes(
    arch: Architecture, recipe: Recipe, optimizer: str, *, tier: str, parameters: str, early: bool, accumulation: int
) -> tuple[int, int, int]:
    """(host, NVMe, written to NVMe a step). `early`: updates run beside backward."""
    block, rest = units(arch, recipe, optimizer)
    every = [block] * arch.layers + [rest]
    total = sum(unit.total_bytes for unit in every)
    widest = max(p.elements for p in parameter_table(arch))
    host = landing_bytes([unit.weight_bytes for unit in every], few=early and accumulation == 1)
    host += addend_bytes(widest * DTYPE_BYTES[recipe.weight], accumulation)
    one_call = optimizer == "adamw" and recipe.weight == recipe.moment and not recipe.master
    if not one_call and recipe.weight != "fp32":
        host += 4 * widest  # the gradient that is updated with, in fp32
    if tier == "cpu":
        return host + total, 0, 0
    host += pool_bytes((unit.total_bytes for unit in every), STATE_BUFFERS)
    if parameters == "cpu":
        host += block.weight_bytes * arch.layers
    elif parameters == "nvme":
        host += pool_bytes([block.weight_bytes] * arch.layers, WEIGHT_BUFFERS)
    stored = parameters == "nvme" or not recipe.master
    return host, total, total if stored else total - sum(unit.weight_bytes for unit in every)
