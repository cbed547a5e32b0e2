"""What every attention kernel is called through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Run(Protocol):
    """q (B, H, Sq, D), k and v (B, K, Sk, D) in one dtype -> (B, H, Sq, D), scaled by 1/√D.

    H is a multiple of K. `causal` is aligned bottom-right: the last query sees every key.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: float) -> Tensor: ...


@dataclass(frozen=True)
class Kernel:
    """An attention kernel. `name` is what really runs, `note` why that is not what was asked for (or empty)."""

    name: str
    run: Run
    note: str = ""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, dropout: float = 0.0) -> Tensor:
        """Attention of q (B, H, Sq, D) over k and v (B, K, Sk, D); the output has q's shape.

        Raises ValueError if H is no multiple of K, or if causal queries outnumber the keys (the first would see none).
        """
        if q.shape[1] % k.shape[1]:
            raise ValueError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key heads")
        if causal and q.shape[2] > k.shape[2]:
            raise ValueError(f"{q.shape[2]} causal queries over {k.shape[2]} keys: the first would see none")
        device = q.device.type
        if not torch.is_autocast_enabled(device):
            return self.run(q, k, v, causal, dropout)
        # What autocast does to torch's own attention, for every kernel and on every device.
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return self.run(q.to(dtype), k.to(dtype), v.to(dtype), causal, dropout)
