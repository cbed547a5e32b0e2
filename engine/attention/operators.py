"""What our two flash attentions share as PyTorch operators.

Each is one operator forward and one backward, so that whatever watches operators (a selective checkpoint policy, a
FLOP counter, fake tensors) sees one of each, as with torch's fused kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from engine.attention.flops import register_attention


def empty_forward(q: Tensor) -> tuple[Tensor, Tensor]:
    """The output, shaped like q (B, H, Sq, D), and the log-sum-exp (B, H, Sq)."""
    return rows_of_heads(q), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are taken in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def rows_of_heads(x: Tensor) -> Tensor:
    """Empty, of x's shape (B, H, S, D), lying as (B, S, H, D): a projection to or from heads is then a view."""
    batch, heads, rows, width = x.shape
    return x.new_empty(batch, rows, heads, width).transpose(1, 2)


def register(forward: CustomOpDef, backward: CustomOpDef) -> None:
    """Fake implementations and FLOPs of both, and `backward` as the gradient of `forward`."""

    def fake_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return empty_forward(q)

    def fake_backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return rows_of_heads(q), torch.empty_like(k), torch.empty_like(v)

    def save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:3], *output)
        ctx.causal = inputs[3]
        ctx.mark_non_differentiable(output[1])

    def gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return (*backward(grad, *ctx.saved_tensors, ctx.causal), None)

    forward.register_fake(fake_forward)
    backward.register_fake(fake_backward)
    forward.register_autograd(gradient, setup_context=save)
    register_attention(_packet(forward), _packet(backward))


def _packet(operator: CustomOpDef) -> Any:
    """torch.ops.remat.NAME."""
    return getattr(torch.ops.remat, operator._name)
