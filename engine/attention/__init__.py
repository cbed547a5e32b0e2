"""Attention kernels: which one a spec's `attention` runs, and what it is when it cannot be the one asked for.

`standard` materialises the scores, `tiled` is our flash attention in PyTorch, `triton` ours on CUDA, `flash` torch's.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from engine.attention.fused import efficient_cuda, flash_cpu, flash_cuda
from engine.attention.kernel import Kernel
from engine.attention.standard import standard_attention
from engine.attention.tiled import tiled_attention
from engine.errors import UnsupportedError
from engine.spec import Attention

__all__ = ["Kernel", "select_kernel"]

LARGEST_FLASH_HEAD = 256  # what CUDA's FlashAttention takes


def select_kernel(
    name: Attention, *, device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float
) -> Kernel:
    """The kernel that really runs for a spec's `attention`; `note` states a fall-back, which is never silent.

    Raises UnsupportedError where neither the kernel nor an honest fall-back exists.
    """
    if name == "flash":
        return _fused_kernel(device, dtype, head_dim, dropout)
    if name == "standard":
        return Kernel("standard", standard_attention)
    if name == "tiled":
        return (
            Kernel("tiled", tiled_attention) if dropout == 0.0 else _instead("tiled", "our tiled kernel has no dropout")
        )
    return _triton_kernel(device, head_dim, dropout)


def _fused_kernel(device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float) -> Kernel:
    if device.type == "cpu":
        if dropout > 0.0:
            return _instead("flash", "SDPA's fused CPU kernel has no dropout")
        return Kernel("sdpa-flash-cpu", flash_cpu)
    if head_dim > LARGEST_FLASH_HEAD:
        return _instead("flash", f"FlashAttention takes heads of at most {LARGEST_FLASH_HEAD}, not {head_dim}")
    if dtype in (torch.float16, torch.bfloat16):
        return Kernel("sdpa-flash", flash_cuda)
    return Kernel(
        "sdpa-efficient",
        efficient_cuda,
        "attention=flash: FlashAttention takes fp16 and bf16 only; in fp32 SDPA's memory-efficient kernel runs",
    )


def _triton_kernel(device: torch.device, head_dim: int, dropout: float) -> Kernel:
    if device.type != "cuda":
        raise UnsupportedError("attention", f"the triton kernel needs a CUDA device, not {device}: use tiled")
    if not find_spec("triton"):
        raise UnsupportedError("attention", "the triton kernel needs the package triton: pip install 'remat[triton]'")
    if dropout > 0.0:
        return _instead("triton", "it has no dropout")
    if head_dim > LARGEST_FLASH_HEAD:
        return _instead("triton", f"it takes heads of at most {LARGEST_FLASH_HEAD}, not {head_dim}")
    from engine.attention.triton_attention import triton_attention  # its dependency is optional

    return Kernel("triton", triton_attention)


def _instead(asked: str, reason: str) -> Kernel:
    note = f"attention={asked}: {reason}; standard attention runs and the scores are materialised"
    return Kernel("standard", standard_attention, note)
