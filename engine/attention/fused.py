"""`flash`: torch's fused kernels, pinned so that nothing can fall back to the math path unseen.

On a CPU the aten operator behind scaled_dot_product_attention is called by name: it runs or it raises. On CUDA the
backend is pinned with `sdpa_kernel`. Both save q, k, v, the output and one log-sum-exp a row for backward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from engine.attention.standard import causal_bias


def flash_cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: float) -> Tensor:
    """torch's fused CPU kernel; shapes as in `Kernel`. It has no dropout: callers check."""
    assert dropout == 0.0
    square = q.shape[2] == k.shape[2]
    # The kernel's own causal mask is aligned top-left; a single query needs none, a prefill chunk brings one.
    mask = causal_bias(q.shape[2], k.shape[2], q) if causal and not square and q.shape[2] > 1 else None
    output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal and square, attn_mask=mask
    )[0]
    return output


def flash_cuda(q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: float) -> Tensor:
    """FlashAttention through SDPA: fp16 and bf16."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _sdpa(q, k, v, causal, dropout)


def efficient_cuda(q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: float) -> Tensor:
    """The memory-efficient kernel through SDPA: fp32 too. It knows no grouped heads, so K and V are repeated."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return _sdpa(q, k, v, causal, dropout)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: float) -> Tensor:
    rectangle = causal and q.shape[2] != k.shape[2]
    mask = causal_lower_right(q.shape[2], k.shape[2]) if rectangle else None
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal=causal and not rectangle, enable_gqa=q.shape[1] != k.shape[1]
    )
