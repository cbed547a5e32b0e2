"""Our flash attention in Triton, on CUDA: what launches the kernels, as one operator forward and one backward.

fp16, bf16 and fp32; head sizes up to 256; grouped heads share K and V where they lie. Saved for backward: q, k, v, the
output, and one fp32 log-sum-exp a row (in base 2).
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from engine.attention.operators import empty_forward, register, rows_of_heads
from engine.attention.triton_kernels import backward_keys_kernel, backward_queries_kernel, forward_kernel

LOG2E = math.log2(math.e)


def triton_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: float) -> Tensor:
    """Shapes as in `Kernel`. It has no dropout: callers check."""
    assert dropout == 0.0
    output: Tensor = triton_forward(q, k, v, causal)[0]
    return output


@torch.library.custom_op("remat::triton_attention", mutates_args=())
def triton_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp (B, H, Sq), base 2."""
    q, k, v = (_rows_contiguous(x) for x in (q, k, v))
    output, lse = empty_forward(q)
    tile = _tile(q)
    grid = (triton.cdiv(q.shape[2], tile["M"]), q.shape[0] * q.shape[1])
    strides = [stride for x in (q, k, v, output) for stride in x.stride()[:3]]
    scale = LOG2E * q.shape[-1] ** -0.5
    forward_kernel[grid](q, k, v, output, lse, *strides, *_sizes(q, k), scale, CAUSAL=causal, **tile)
    return output, lse


@torch.library.custom_op("remat::triton_attention_backward", mutates_args=())
def triton_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    q, k, v, grad = (_rows_contiguous(x) for x in (q, k, v, grad))
    delta = torch.linalg.vecdot(grad.float(), output.float()).contiguous()
    grad_q, grad_k, grad_v = rows_of_heads(q), rows_of_heads(k), rows_of_heads(v)
    tile = _tile(q)
    strides = [stride for x in (q, k, v, grad) for stride in x.stride()[:3]]
    inputs, scale = (q, k, v, grad, lse, delta), q.shape[-1] ** -0.5
    rest = (*_sizes(q, k), LOG2E * scale, scale)
    grid = (triton.cdiv(k.shape[2], tile["N"]), k.shape[0] * k.shape[1])
    backward_keys_kernel[grid](
        *inputs, grad_k, grad_v, *strides, *grad_k.stride()[:3], *rest, CAUSAL=causal, **tile
    )  # fmt: skip
    grid = (triton.cdiv(q.shape[2], tile["M"]), q.shape[0] * q.shape[1])
    backward_queries_kernel[grid](*inputs, grad_q, *strides, *grad_q.stride()[:3], *rest, CAUSAL=causal, **tile)
    return grad_q, grad_k, grad_v


def _sizes(q: Tensor, k: Tensor) -> tuple[int, ...]:
    """Heads, query heads a key head, queries, keys, head size."""
    return q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2], q.shape[3]


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _tile(q: Tensor) -> dict[str, int]:
    """Tile sizes and launch options by head size: tiles shrink so that they fit an SM's shared memory, more in fp32."""
    padded = max(16, triton.next_power_of_2(q.shape[-1]))
    side = 128 if padded <= 64 else 64 if padded <= 128 else 32
    side = side if q.element_size() == 2 else max(16, side // 2)
    return {"M": side, "N": min(side, 64), "D": padded, "num_warps": 8 if side == 128 else 4, "num_stages": 2}


register(triton_forward, triton_backward)
