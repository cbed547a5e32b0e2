"""FLOP formulas for attention operators that torch's FLOP counter does not know.

Counted like torch's own formulas for its CUDA kernels: the whole Sq×Sk rectangle, causal or not, so that one model has
one count on every kernel and device. Forward is 2 products; backward is 5, one of them the recomputed scores
(Dao 2023, arXiv 2307.08691, section 4.1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula


def product_flops(q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> int:
    """FLOPs of q (B, H, Sq, D) times kᵀ, k (B, K, Sk, D): 2·B·H·Sq·Sk·D."""
    batch, heads, queries, width = q_shape
    return 2 * batch * heads * queries * k_shape[2] * width


def forward_flops(q_shape: Any, k_shape: Any, *_: Any, **__: Any) -> int:
    return 2 * product_flops(q_shape, k_shape)


def backward_flops(_grad_shape: Any, q_shape: Any, k_shape: Any, *_: Any, **__: Any) -> int:
    return 5 * product_flops(q_shape, k_shape)


def register_attention(forward: Any, backward: Any) -> None:
    """Teach torch's FLOP counter a pair of operators whose first arguments are (q, k, v) and (grad, q, k, v)."""
    register_flop_formula(forward)(forward_flops)
    register_flop_formula(backward)(backward_flops)


register_attention(
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
