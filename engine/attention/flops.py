"""FLOP formulas for attention operators that torch's FLOP counter does not know: import this module to register them.

Counted like torch's own formulas for its CUDA kernels: the whole Sq×Sk rectangle, causal or not, so that one model has
one count on every kernel and device. Forward is 2 products; backward is 5, one of them the recomputed scores
(Dao 2023, arXiv 2307.08691, section 4.1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from engine.attention import tiled as tiled  # registers its operators

FORWARD = [
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.remat.tiled_attention,
    torch.ops.remat.triton_attention,
]
BACKWARD = [
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    torch.ops.remat.tiled_attention_backward,
    torch.ops.remat.triton_attention_backward,
]


def product_flops(q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> int:
    """FLOPs of q (B, H, Sq, D) times kᵀ, k (B, K, Sk, D): 2·B·H·Sq·Sk·D."""
    batch, heads, queries, width = q_shape
    return 2 * batch * heads * queries * k_shape[2] * width


@register_flop_formula(FORWARD)
def forward_flops(q_shape: Any, k_shape: Any, *_: Any, **__: Any) -> int:
    return 2 * product_flops(q_shape, k_shape)


@register_flop_formula(BACKWARD)
def backward_flops(_grad_shape: Any, q_shape: Any, k_shape: Any, *_: Any, **__: Any) -> int:
    return 5 * product_flops(q_shape, k_shape)
