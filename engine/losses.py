"""Next-token cross-entropy from hidden states, whole or chunk by chunk. N = B·S tokens, d hidden, V vocabulary.

Logits are made in the compute dtype (e bytes an element), the softmax is taken in fp32, as transformers does. Peaks,
beyond hidden states and weights: whole, 8·N·V bytes in forward and 12·N·V in backward; in C chunks 8·N·V / C in both,
plus the weights' gradient (e·V·d) in backward, which is summed over the chunks in their dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *, chunks: int = 1) -> Tensor:
    """Mean cross-entropy of hidden (B, S, d) @ weight (V, d)ᵀ against targets (B, S), an fp32 scalar.

    `chunks` = 1 keeps the softmax of every token for backward: 4·N·V bytes. More chunks keep only `hidden`, and
    backward makes each chunk's logits again.
    """
    if chunks == 1:
        return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1).float(), targets.flatten())
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    return _chunked(hidden.flatten(0, 1), weight, targets.flatten(), chunks)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """hidden (N, d), weight (V, d), targets (N,) -> mean loss. Saves its three inputs and nothing else."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunks: int) -> Tensor:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.chunks = chunks
        with torch.autocast(hidden.device.type, enabled=False):
            losses = [
                F.cross_entropy((part @ weight.mT).float(), answers, reduction="sum")
                for part, answers in zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True)
            ]
        return torch.stack(losses).sum() / len(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """d loss / d logits = (softmax - one-hot) / N, made in place of each chunk's logits."""
        hidden, weight, targets = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for part, answers, grad_part in zip(
            *(x.chunk(ctx.chunks) for x in (hidden, targets, grad_hidden)), strict=True
        ):
            slope = (part @ weight.mT).float()
            slope.sub_(slope.logsumexp(-1, keepdim=True)).exp_()
            slope.scatter_add_(1, answers.unsqueeze(1), slope.new_full((len(answers), 1), -1.0))
            slope = slope.mul_(grad / len(hidden)).to(hidden.dtype)
            torch.mm(slope, weight, out=grad_part)
            grad_weight.addmm_(slope.mT, part)
        return grad_hidden, grad_weight, None, None


_chunked: Callable[[Tensor, Tensor, Tensor, int], Tensor] = _ChunkedCrossEntropy.apply
