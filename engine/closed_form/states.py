"""Parameters, gradients and optimizer states: every parameter tensor of the decoder, in `named_parameters` order, and
what the optimizer's step needs beside them."""

from __future__ import annotations

from engine.architecture import Architecture, Parameter, parameter_table
from engine.recipes import DTYPE_BYTES, Recipe, state_bytes


def block_parameters(arch: Architecture) -> list[Parameter]:
    """The parameter tensors of the blocks."""
    return [parameter for parameter in parameter_table(arch) if parameter.in_block]


def parameter_elements(arch: Architecture) -> int:
    return sum(parameter.elements * parameter.count for parameter in parameter_table(arch))


def rotary_buffer_bytes(arch: Architecture, positions: int, dtype: str) -> int:
    """cos and sin tables, each (positions, D)."""
    return 2 * positions * arch.head_dim * DTYPE_BYTES[dtype] if arch.positions == "rope" else 0


def optimizer_state_bytes(arch: Architecture, recipe: Recipe, optimizer: str) -> int:
    """Master copies, moments and step counters of all parameters."""
    return sum(state_bytes(recipe, optimizer, p.elements) * p.count for p in parameter_table(arch))


def step_scratch_bytes(recipe: Recipe, optimizer: str, elements: int) -> int:
    """Temporaries while one parameter of `elements` is updated.

    One fused call where weights and moments share a dtype needs none. Otherwise the gradient, and without a master
    copy the weight, are widened to fp32; 8-bit moments are expanded (2 fp32 copies) and compressed (3 more).
    """
    widened = 0 if recipe.weight == "fp32" else 4 * elements
    copies = widened * (1 if recipe.master else 2)
    if optimizer == "adamw-8bit":
        return copies + 5 * 4 * elements
    if optimizer == "adamw" and recipe.weight == recipe.moment:
        return 0
    return copies


def optimizer_scratch_bytes(arch: Architecture, recipe: Recipe, optimizer: str) -> int:
    """The most that temporaries of the optimizer's step take: those of the largest parameter. All gradients are alive
    beside them, since the step drops them only when it ends."""
    return max(step_scratch_bytes(recipe, optimizer, parameter.elements) for parameter in parameter_table(arch))
