"""Our flash attention in plain PyTorch: exact attention without the (Sq, Sk) scores ever existing.

Dao et al. 2022 (arXiv 2205.14135, algorithms 1 and 4) with the loop order and the single log-sum-exp of
FlashAttention-2 (Dao 2023, arXiv 2307.08691): a tile of queries meets the tiles of keys one after another, keeping a
running maximum m, a running sum l and an unnormalised output; backward recomputes each tile of probabilities as
exp(q·kᵀ/√D - lse). Saved for backward: q, k, v, the output, and lse = m + log l, one fp32 number a row. Powers are of
two, log2(e) being part of the scale: exp2 takes a third of exp's time.

A tile has up to LANES key heads of one sequence. The G query heads that share a key head are G times more rows of it,
so grouped queries need no copy of K and V. Half precision is widened tile by tile: products and sums are fp32.
Scratch is a few tiles of at most SIDE²/2, whatever the lengths; in half precision, backward also sums dK and dV in
fp32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.operators import empty_forward, register, rows_of_heads, wide

SIDE = 384
"""Keys in a tile; it has half as many rows: query positions times the query heads that share a key head. Scores of one
lane, 288 KiB in fp32, stay in a core's cache, and few of them lie above the diagonal."""
SMALLEST_SIDE = 64
LANES = 8
"""Key heads in a tile."""
LN_2 = math.log(2.0)


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: float) -> Tensor:
    """Shapes as in `Kernel`; any head size, any lengths, any device. It has no dropout: callers check."""
    assert dropout == 0.0
    output: Tensor = tiled_forward(q, k, v, causal)[0]
    return output


@torch.library.custom_op("remat::tiled_attention", mutates_args=())
def tiled_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp (B, H, Sq)."""
    output, lse = empty_forward(q)
    scratch = _scratch(q, k)
    scale = q.shape[-1] ** -0.5 / LN_2
    for tile in _query_tiles(q, k, causal):
        queries = tile.read(q).mul_(scale)
        maximum = queries.new_full((*queries.shape[:2], 1), -torch.inf)
        total, summed = torch.zeros_like(maximum), torch.zeros_like(queries)
        for columns in tile.columns(k):
            scores = _shaped(scratch, queries, columns)
            torch.bmm(queries, tile.keys(k, columns).mT, out=scores)
            tile.hide(scores, columns)
            risen = torch.maximum(maximum, scores.amax(-1, keepdim=True))
            weights = scores.sub_(risen).exp2_()
            shrink = maximum.sub_(risen).exp2_()
            total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
            summed.mul_(shrink).baddbmm_(weights, tile.keys(v, columns))
            maximum = risen
        tile.write(output, summed.div_(total))
        tile.write(lse.unsqueeze(-1), maximum.add_(total.log2_()).mul_(LN_2))
    return output, lse


@torch.library.custom_op("remat::tiled_attention_backward", mutates_args=())
def tiled_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v. With S = Q·Kᵀ/√D and P = exp(S - lse): dV = Pᵀ·dO, dS = P∘(dO·Vᵀ - rowsum(dO∘O)),
    dQ = dS·K/√D and dK = dSᵀ·Q/√D."""
    grad_q = rows_of_heads(q)
    sum_k, sum_v = (torch.zeros_like(x, dtype=wide(x.dtype)) for x in (k, v))
    scratch, other = _scratch(q, k), _scratch(q, k)
    scale = q.shape[-1] ** -0.5
    for tile in _query_tiles(q, k, causal):
        queries, upstream = tile.read(q).mul_(scale / LN_2), tile.read(grad)
        statistic = tile.read(lse.unsqueeze(-1)).div_(LN_2)
        projection = tile.read(output).mul_(upstream).sum(-1, keepdim=True)
        summed = torch.zeros_like(queries)
        for columns in tile.columns(k):
            keys = tile.keys(k, columns)
            scores = _shaped(scratch, queries, columns)
            torch.bmm(queries, keys.mT, out=scores).sub_(statistic)
            tile.hide(scores, columns)
            weights = scores.exp2_()
            tile.keys(sum_v, columns).add_(torch.bmm(weights.mT, upstream))
            slope = _shaped(other, queries, columns)
            torch.bmm(upstream, tile.keys(v, columns).mT, out=slope).sub_(projection).mul_(weights)
            summed.baddbmm_(slope, keys)
            tile.keys(sum_k, columns).add_(torch.bmm(slope.mT, queries))
        tile.write(grad_q, summed.mul_(scale))
    return grad_q, sum_k.mul_(LN_2).to(k.dtype), sum_v.to(v.dtype)


register(tiled_forward, tiled_backward)


@dataclass(frozen=True)
class _QueryTile:
    """Rows of queries of some key heads of one sequence, over the heads that share each."""

    batch: int
    heads: slice
    rows: slice
    kv_heads: int
    side: int
    """Keys in a tile of keys."""
    last_seen: int | None
    """The last key that the first row sees; each further row sees one more. None = every row sees every key."""

    def read(self, x: Tensor) -> Tensor:
        """A wide copy of this tile's part of x (B, H, Sq, ·), as (lanes, G·rows, ·)."""
        part = self._part(x).flatten(1, 2)
        return part.to(wide(part.dtype), copy=True, memory_format=torch.contiguous_format)

    def write(self, x: Tensor, value: Tensor) -> None:
        """The inverse of `read`: into x."""
        part = self._part(x)
        part.copy_(value.view_as(part))

    def _part(self, x: Tensor) -> Tensor:
        """(lanes, G, rows, ·), a view of x."""
        grouped: Tensor = x.unflatten(1, (self.kv_heads, -1))
        return grouped[self.batch, self.heads, :, self.rows]

    def keys(self, x: Tensor, columns: slice) -> Tensor:
        """This tile's columns of x (B, K, Sk, D), wide: (lanes, columns, D). A view where x is wide already."""
        part = x[self.batch, self.heads, columns]
        return part.to(wide(part.dtype))

    def columns(self, k: Tensor) -> Iterator[slice]:
        """The tiles of keys that some row sees."""
        stop = k.shape[2] if self.last_seen is None else self.last_seen + self.rows.stop - self.rows.start
        for start in range(0, stop, self.side):
            yield slice(start, min(start + self.side, stop))

    def hide(self, scores: Tensor, columns: slice) -> None:
        """-inf where a row does not see a key; touches only tiles on the diagonal."""
        if self.last_seen is not None and columns.stop - 1 > self.last_seen:
            shape = (self.rows.stop - self.rows.start, columns.stop - columns.start)
            mask = scores.new_full(shape, -torch.inf).triu_(self.last_seen - columns.start + 1)
            scores.unflatten(1, (-1, shape[0])).add_(mask)


def _query_tiles(q: Tensor, k: Tensor, causal: bool) -> Iterator[_QueryTile]:
    batch, kv_heads, keys, _ = k.shape
    side, positions = _sides(q, k)
    starts = range(0, q.shape[2], positions)
    for sequence, head, start in itertools.product(range(batch), range(0, kv_heads, LANES), starts):
        heads = slice(head, min(head + LANES, kv_heads))
        rows = slice(start, min(start + positions, q.shape[2]))
        yield _QueryTile(sequence, heads, rows, kv_heads, side, start + keys - q.shape[2] if causal else None)


def _sides(q: Tensor, k: Tensor) -> tuple[int, int]:
    """Keys and query positions in a tile. A short sequence has smaller ones: scratch stays a small share of it."""
    side = min(SIDE, max(SMALLEST_SIDE, k.shape[2] // 8))
    return side, max(1, side // 2 * k.shape[1] // q.shape[1])


def _scratch(q: Tensor, k: Tensor) -> Tensor:
    """Room for the scores of a tile, flat: a smaller tile at an edge is then contiguous too."""
    side, positions = _sides(q, k)
    rows = positions * q.shape[1] // k.shape[1]
    return q.new_empty(min(LANES, k.shape[1]) * rows * side, dtype=wide(q.dtype))


def _shaped(scratch: Tensor, queries: Tensor, columns: slice) -> Tensor:
    lanes, rows, _ = queries.shape
    width = columns.stop - columns.start
    return scratch[: lanes * rows * width].view(lanes, rows, width)
