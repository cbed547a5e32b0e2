"""Precision recipes and optimizers as tables: which bytes a parameter costs and where. Torch-free.

Sources: ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1: 2 + 2 + 12 bytes) for `bf16-mixed`;
the course's 12 bytes for `bf16-12`; Dettmers et al. 2022 (arXiv 2110.02861) for block-wise 8-bit moments.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "int64": 8, "int8": 1, "bool": 1}

BLOCK_8BIT = 256
"""Elements that share one fp32 scale in `adamw-8bit`."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Dtypes of one precision recipe. Gradients have the dtype of the weights."""

    weight: str
    moment: str
    master: bool = False
    """An fp32 master copy of the weights."""
    autocast: bool = False
    """Matmuls in bf16 under autocast."""

    @property
    def compute(self) -> str:
        """Dtype of the activations that matmuls make."""
        return "bf16" if self.autocast else self.weight


RECIPES: dict[str, Recipe] = {
    "bf16-mixed": Recipe(weight="bf16", moment="fp32", master=True),
    "bf16": Recipe(weight="bf16", moment="bf16"),
    "bf16-12": Recipe(weight="bf16", moment="fp32"),
    "fp32": Recipe(weight="fp32", moment="fp32"),
    "bf16-autocast": Recipe(weight="fp32", moment="fp32", autocast=True),
}

MOMENTS = {"adamw": 2, "sgd": 0, "adamw-8bit": 2}
"""Moments an optimizer keeps for each parameter element."""


def state_bytes(recipe: Recipe, optimizer: str, elements: int) -> int:
    """Optimizer-state bytes of one parameter tensor: master copy, moments, and AdamW's fp32 step counter."""
    master = 4 * elements if recipe.master else 0
    if optimizer == "sgd":
        return master
    if optimizer == "adamw-8bit":
        blocks = -(-elements // BLOCK_8BIT)
        return master + 2 * (elements + 4 * blocks) + 4
    return master + 2 * DTYPE_BYTES[recipe.moment] * elements + 4
