"""`none`, `per-layer`, `every-K` and `sqrt`: keep a segment's input, recompute its inside in backward.

Chen et al. 2016 (arXiv 1604.06174). A segment is K blocks; `per-layer` is K = 1, `sqrt` K = √L.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.checkpoint_names import Checkpointing


class Segment(nn.Module):
    """Consecutive blocks whose inside is recomputed in backward from their saved input.

    Early stop: recomputation ends once the last saved tensor is back, so the segment's last matmul is not repeated.
    """

    def __init__(self, blocks: list[nn.Module], dropout: bool) -> None:
        super().__init__()
        self.inside = nn.ModuleList(blocks)
        self.dropout = dropout

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        output: Tensor = checkpoint(
            self._run, x, *arguments, use_reentrant=False, preserve_rng_state=self.dropout, **options
        )
        return output

    def _run(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        for block in self.inside:
            x = block(x, *arguments, **options)
        return x


class Passed(nn.Module):
    """Stands where a block was that an earlier segment has already run."""

    def forward(self, x: Tensor, *_arguments: Any, **_options: Any) -> Tensor:
        return x


def keep_all(_blocks: nn.ModuleList, _plan: Checkpointing, _dropout: bool) -> None:
    """`none`: autograd keeps what it needs."""


def segments(blocks: nn.ModuleList, plan: Checkpointing, dropout: bool) -> None:
    length = plan.segment_length(len(blocks))
    inside = list(blocks)
    for start in range(0, len(inside), length):
        members = inside[start : start + length]
        blocks[start] = Segment(members, dropout)
        for index in range(start + 1, start + len(members)):
            blocks[index] = Passed()
