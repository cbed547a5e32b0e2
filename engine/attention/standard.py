"""Standard attention: the scores, their softmax and its dropout exist as whole (B, H, Sq, Sk) tensors.

What autograd keeps, in the compute dtype (e bytes an element), with grouped queries (K key heads) never repeated:

| tensor                    | bytes             |                                              |
|---------------------------|-------------------|----------------------------------------------|
| q, k, v                   | e·B·S·D·(H + 2K)  | by the two matrix products                   |
| softmax output            | e·B·H·Sq·Sk       | by softmax, and by the second product        |
| dropout mask (dropout>0)  | 1·B·H·Sq·Sk       | bool                                         |
| dropped (dropout>0)       | e·B·H·Sq·Sk       | by the second product                        |

With dropout in a 2-byte dtype that is the 5·a·S²·B of Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1). The
scores live only until their softmax is there: forward holds two such tensors at once, backward three. Scale and
causal mask are part of the first product, so they cost no tensor of their own beyond one (G·Sq, Sk) bias, G = H / K.
"""

from __future__ import annotations

import torch
from torch import Tensor


def standard_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: float) -> Tensor:
    """The plain formula; shapes as in `Kernel`. Dropout is applied to the softmax output."""
    batch, kv_heads, _, width = k.shape
    groups = q.shape[1] // kv_heads
    rows = q.unflatten(1, (kv_heads, groups)).reshape(batch * kv_heads, -1, width)
    probabilities = torch.softmax(_scores(rows, k.flatten(0, 1), groups, causal), dim=-1)
    if dropout > 0.0:
        probabilities = torch.native_dropout(probabilities, dropout, True)[0]
    mixed = torch.bmm(probabilities, v.flatten(0, 1))
    return mixed.view(batch, q.shape[1], -1, v.shape[-1])


def _scores(rows: Tensor, keys: Tensor, groups: int, causal: bool) -> Tensor:
    """rows (B·K, G·Sq, D) against keys (B·K, Sk, D) -> (B·K, G·Sq, Sk): q·kᵀ/√D + bias in one product."""
    scale = rows.shape[-1] ** -0.5
    if not causal:
        return torch.baddbmm(rows.new_empty(()), rows, keys.mT, beta=0, alpha=scale)
    bias = causal_bias(rows.shape[1] // groups, keys.shape[1], rows)
    return torch.baddbmm(bias if groups == 1 else bias.repeat(groups, 1), rows, keys.mT, alpha=scale)


def causal_bias(queries: int, keys: int, like: Tensor) -> Tensor:
    """(Sq, Sk): 0 where a query sees a key, -inf where not; the last query sees every key."""
    return like.new_full((queries, keys), -torch.inf).triu_(keys - queries + 1)
