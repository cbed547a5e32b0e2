"""RMSNorm that saves its input and one reciprocal per row on every device.

torch's CPU `rms_norm` decomposes into pointwise ops and saves a normalised copy too, which CUDA's fused kernel does
not. This op saves on the CPU what the fused kernel saves, so that CPU figures mean something for a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("remat::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(..., d), (d,) -> normalised (..., d) in x's dtype, fp32 reciprocal root mean square (..., 1)."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    reciprocal = length.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
    return torch.mul(x, reciprocal).to(x.dtype).mul_(weight), reciprocal


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@torch.library.custom_op("remat::rms_norm_backward", mutates_args=())
def _rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, reciprocal: Tensor) -> tuple[Tensor, Tensor]:
    """With y = x·r·w: dw = Σ g·x·r and dx = r·(g·w - x·r²·mean(g·w·x))."""
    scaled = torch.mul(x, reciprocal)
    grad_weight = torch.mul(scaled, grad).flatten(0, -2).sum(0).to(weight.dtype)
    weighted = torch.mul(grad, weight).to(scaled.dtype)
    projection = torch.linalg.vecdot(weighted, scaled).unsqueeze(-1).div_(x.shape[-1])
    grad_x = weighted.sub_(scaled.mul_(projection)).mul_(reciprocal)
    return grad_x.to(x.dtype), grad_weight


@_rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, reciprocal: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, reciprocal = ctx.saved_tensors
    grad_x, grad_weight = _rms_norm_backward(grad, x, weight, reciprocal)
    return grad_x, grad_weight, None


_rms_norm.register_autograd(_backward, setup_context=_save)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    normalised: Tensor = _rms_norm(x, weight, epsilon)[0]
    return normalised
