"""Parameters, gradients and optimizer states: every parameter tensor of the decoder, in `named_parameters` order, and
what the optimizer's step needs beside them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod

from engine.architecture import Architecture
from engine.recipes import DTYPE_BYTES, Recipe, state_bytes


@dataclass(frozen=True, slots=True)
class Parameter:
    """`count` parameter tensors of one shape (one a block)."""

    name: str
    shape: tuple[int, ...]
    group: str
    count: int = 1

    @property
    def elements(self) -> int:
        return prod(self.shape)


def _projection(name: str, rows: int, columns: int, group: str, bias: bool, count: int) -> list[Parameter]:
    weight = Parameter(f"{name}.weight", (rows, columns), group, count)
    return [weight, Parameter(f"{name}.bias", (rows,), group, count)] if bias else [weight]


def _norm(arch: Architecture, name: str, group: str, count: int) -> list[Parameter]:
    weight = Parameter(f"{name}.weight", (arch.hidden,), group, count)
    return [weight, Parameter(f"{name}.bias", (arch.hidden,), group, count)] if arch.norm == "layernorm" else [weight]


@cache
def parameter_table(arch: Architecture) -> tuple[Parameter, ...]:
    """Every parameter tensor; a tied head is not repeated."""
    layers, outside = arch.layers, "outside-blocks"
    table = [Parameter("embedding.weight", (arch.vocab, arch.hidden), outside)]
    if arch.positions == "learned":
        table.append(Parameter("positions.weight", (arch.max_positions or 0, arch.hidden), outside))
    table += _norm(arch, "attention_norm", "norms", layers)
    table += _projection("q", arch.query_width, arch.hidden, "qkv", arch.qkv_bias, layers)
    table += _projection("k", arch.kv_width, arch.hidden, "qkv", arch.qkv_bias, layers)
    table += _projection("v", arch.kv_width, arch.hidden, "qkv", arch.qkv_bias, layers)
    table += _projection("attention.out", arch.hidden, arch.query_width, "attention-out", arch.output_bias, layers)
    table += _norm(arch, "mlp_norm", "norms", layers)
    table += _projection("mlp.up", arch.ffn, arch.hidden, "mlp-in", arch.mlp_bias, layers)
    if arch.gated:
        table += _projection("mlp.gate", arch.ffn, arch.hidden, "mlp-in", arch.mlp_bias, layers)
    table += _projection("mlp.down", arch.hidden, arch.ffn, "mlp-out", arch.mlp_bias, layers)
    table += _norm(arch, "norm", outside, 1)
    if not arch.tied:
        table.append(Parameter("head.weight", (arch.vocab, arch.hidden), outside))
    return tuple(table)


def block_parameters(arch: Architecture) -> list[Parameter]:
    """The parameter tensors of the blocks."""
    return [parameter for parameter in parameter_table(arch) if parameter.group != "outside-blocks"]


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


def optimizer_peak_bytes(arch: Architecture, recipe: Recipe, optimizer: str) -> int:
    """The most that gradients not yet dropped and temporaries take together during the optimizer step.

    Parameters are updated in order and each gradient is dropped after its own update.
    """
    size = DTYPE_BYTES[recipe.weight]
    remaining = parameter_elements(arch) * size
    worst = 0
    table = parameter_table(arch)
    blocks = block_parameters(arch)
    for parameter in table:
        worst = max(worst, remaining + step_scratch_bytes(recipe, optimizer, parameter.elements))
        if parameter not in blocks:
            remaining -= parameter.elements * size
        elif parameter == blocks[-1]:
            remaining -= sum(p.elements * p.count for p in blocks) * size
    return worst
