"""Next-token cross-entropy from hidden states. N = B·S tokens, d hidden, V vocabulary.

`fused` (ours) takes the gradient in forward, in place, one chunk of rows at a time: the logits never outlive the loss,
nothing is recomputed, and what backward needs is the gradient of the hidden states (N·d) and of the head (V·d). The
idea is Liger's FusedLinearCrossEntropy (Hsu et al. 2024, arXiv 2410.10989, section 3.2), here in plain PyTorch.

`standard` is what transformers and most training code do: logits in the compute dtype, softmax in fp32, both held
until backward. Peaks in fp32, beyond hidden states and weights: standard 12·N·V bytes, fused 4·N·V / chunks + 4·V·d.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *, chunks: int = 1, fused: bool = True) -> Tensor:
    """Mean cross-entropy, fp32, of hidden (B, S, d) @ weight (V, d)ᵀ against targets (B, S) int64.

    `chunks` > 1 bounds the logits alive at once to ⌈N/chunks⌉ rows (fused only).
    """
    if fused:
        return _fused(hidden, weight, targets, chunks)
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1).float(), targets.flatten())


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """What autocast would multiply in; the hidden states' own dtype without it."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunks: int) -> Tensor:
        dtype = _compute_dtype(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight.to(dtype)
            grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
            rows, labels, grad_rows = hidden.flatten(0, -2), targets.flatten(), grad_hidden.flatten(0, -2)
            loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
            size = -(-rows.shape[0] // chunks)
            for start in range(0, rows.shape[0], size):
                part = slice(start, start + size)
                states = rows[part].to(dtype)
                chunk_loss, gradient = _loss_and_gradient(F.linear(states, head), labels[part], rows.shape[0])
                loss += chunk_loss
                grad_rows[part] = gradient @ head
                _accumulate(grad_weight, gradient, states)
                del gradient  # before the next chunk's logits are made
        # Kept as attributes, not saved tensors: backward must own them to hand them on without a copy.
        ctx.gradients = (grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.gradients
        ctx.gradients = None
        return grad_hidden.mul_(grads[0]), grad_weight.mul_(grads[0]), None, None


_fused: Callable[[Tensor, Tensor, Tensor, int], Tensor] = _FusedCrossEntropy.apply


def _loss_and_gradient(logits: Tensor, labels: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The chunk's share of the mean loss, and its gradient by the logits (n, V) in their dtype, made in place.

    With p = softmax(z): loss = Σ (ln Σ eᶻ - z_label) / N and ∂loss/∂z = (p - onehot(label)) / N.
    """
    dtype = logits.dtype
    wide = logits.float()
    del logits
    labels = labels.unsqueeze(1)
    wide.sub_(wide.amax(1, keepdim=True))
    picked = wide.gather(1, labels)
    normaliser = wide.exp_().sum(1, keepdim=True)
    loss = (normaliser.log() - picked).sum() / total
    wide.div_(normaliser)
    wide.scatter_add_(1, labels, torch.full_like(picked, -1.0))
    return loss, wide.div_(total).to(dtype)


def _accumulate(grad_weight: Tensor, gradient: Tensor, states: Tensor) -> None:
    """grad_weight (V, d) += gradientᵀ (V, n) @ states (n, d), without a temporary where the dtypes allow it."""
    if grad_weight.dtype == gradient.dtype:
        grad_weight.addmm_(gradient.t(), states)
    else:
        grad_weight += gradient.t() @ states
