"""The keys and values of the tokens seen so far, for one block."""

from __future__ import annotations

import torch
from torch import Tensor


class KvCache:
    """Room for `capacity` positions of B sequences and K key heads, allocated once: 2·B·K·capacity·D elements.

    Grouped-query attention stores K heads, not H: its cache is H / K times smaller.
    """

    def __init__(
        self, batch: int, kv_heads: int, capacity: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.keys = torch.empty(batch, kv_heads, capacity, head_dim, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self.length = 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, K, n, D) at the next n positions; views (B, K, length, D) of all that is stored.

        Raises ValueError if the capacity is exceeded.
        """
        start, self.length = self.length, self.length + keys.shape[2]
        if self.length > self.keys.shape[2]:
            raise ValueError(f"the KV cache holds {self.keys.shape[2]} positions, not {self.length}")
        self.keys[:, :, start : self.length] = keys
        self.values[:, :, start : self.length] = values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def bytes_of(self, positions: int) -> int:
        """Bytes that so many positions take."""
        return self.keys[:, :, :positions].nbytes + self.values[:, :, :positions].nbytes
