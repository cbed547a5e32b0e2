"""`selective[:GROUPS]`: inside each block, the named op groups are recomputed and the rest is kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from engine.checkpointing.groups import labelling, watch
from engine.checkpointing.replay import Recording, unpack
from engine.errors import UnsupportedError


class Unmatched:
    """The named groups that no op of any wrapped block has belonged to yet, and the blocks still to run."""

    def __init__(self, groups: Iterable[str], blocks: int) -> None:
        self.groups, self.blocks = set(groups), blocks

    def ran(self, matched: set[str]) -> None:
        """A block ran its first forward. Raises UnsupportedError after the last one if a group is still unmatched."""
        self.groups -= matched
        self.blocks -= 1
        if self.blocks == 0 and self.groups:
            names = ", ".join(sorted(self.groups))
            raise UnsupportedError("checkpointing", f"selective: no operator of this model belongs to {names}")


class SelectiveBlock(nn.Module):
    """A block whose ops of `groups` run again in backward."""

    def __init__(self, block: nn.Module, groups: Iterable[str], dropout: bool, unmatched: Unmatched) -> None:
        super().__init__()
        self.inside, self.groups, self.dropout = block, frozenset(groups), dropout
        self.unmatched: Unmatched | None = unmatched
        watch(block)

    def __getattr__(self, name: str) -> Any:
        """Attributes that a model reads off its blocks are the block's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inside"), name)

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inside(x, *arguments, **options)
        with labelling() as labeller:
            recording = Recording(self.groups, labeller, self.dropout)
            with saved_tensors_hooks(recording.pack, unpack), recording:
                output = self.inside(x, *arguments, **options)
        recording.close()
        if self.unmatched is not None:
            unmatched, self.unmatched = self.unmatched, None
            unmatched.ran(recording.matched)
        return output
