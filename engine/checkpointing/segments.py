"""Running regions: keep a region's input, run its blocks again in backward. Non-reentrant checkpoints, nested at will.

A model calls its blocks one after the other, each with arguments of its own (transformers gives alternating masks). A
region of several blocks therefore only notes what its first members are called with, and runs as a whole when its
last member is called.

Early stop: a second run ends once the last tensor that backward needs is back, so the last block's last matmul is not
repeated.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.checkpointing.rng import Replayed, capture, replay
from engine.checkpointing.tree import Region, leaves
from engine.errors import UnsupportedError

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""What a block is called with beside its input."""


class Runner:
    """One region and its blocks. `arity` is what a block returns: 0 a tensor, n a tuple of n, None not known yet."""

    def __init__(self, region: Region, blocks: dict[int, nn.Module], dropout: bool) -> None:
        self.region, self.blocks, self.dropout = region, blocks, dropout
        self.calls: dict[int, Call] = {}
        self.arity: int | None = 0 if len(blocks) == 1 or all(map(_returns_tensor, blocks.values())) else None

    def note(self, block: int, x: Tensor, call: Call) -> Any:
        """An early member is called: its input is the region's, untouched, in the form its block would return it."""
        if self.arity is None:
            self.arity = self._learn(block, x, call)
        self.calls[block] = call
        return x if self.arity == 0 else (x, *[None] * (self.arity - 1))

    def run(self, block: int, x: Tensor, call: Call) -> Any:
        """The last member is called: run the region."""
        calls, self.calls = self.calls | {block: call}, {}
        return self._again(self.region, calls, x)

    def _learn(self, block: int, x: Tensor, call: Call) -> int:
        """What a block returns, by running it once more, which happens once."""
        arguments, options = call
        with torch.no_grad(), replay(x.device, capture(x.device)):
            output = self.blocks[block](x, *arguments, **options)
        if isinstance(output, Tensor):
            return 0
        if any(isinstance(part, Tensor) for part in output[1:]):
            raise UnsupportedError(
                "checkpointing",
                f"{type(self.blocks[block]).__name__} returns more than its hidden states, which the next blocks may "
                "need: they cannot share a segment; use per-layer or selective",
            )
        return len(output)

    def _again(self, region: Region, calls: dict[int, Call], x: Tensor) -> Any:
        inside = partial(self._run, region, calls)
        if self.dropout and not torch.compiler.is_compiling():
            replayed = Replayed(x.device)
            return checkpoint(inside, x, use_reentrant=False, preserve_rng_state=False, context_fn=replayed.contexts)
        return checkpoint(inside, x, use_reentrant=False, preserve_rng_state=self.dropout)

    def _run(self, region: Region, calls: dict[int, Call], x: Tensor) -> Any:
        output: Any = x
        for node in region.inside:
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(node, Region):
                output = self._again(node, calls, hidden)
            else:
                arguments, options = calls[node.block]
                output = self.blocks[node.block](hidden, *arguments, **options)
        return output


def _returns_tensor(block: nn.Module) -> bool:
    """Whether the block's signature says so; if it does not, its first run will."""
    annotation = inspect.signature(type(block).forward).return_annotation
    return annotation is Tensor or str(annotation) in ("Tensor", "torch.Tensor")


class Member(nn.Module):
    """A block inside a region. Attributes that the model reads off its blocks are the block's."""

    def __init__(self, block: nn.Module, index: int, runner: Runner) -> None:
        super().__init__()
        self.inside, self.index, self.runner = block, index, runner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inside"), name)


class Passed(Member):
    """A member that the region's last one will run."""

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Any:
        return self.runner.note(self.index, x, (arguments, options))


class Last(Member):
    """The member whose call runs the region."""

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Any:
        return self.runner.run(self.index, x, (arguments, options))


def wrap_region(blocks: nn.ModuleList, region: Region, dropout: bool) -> None:
    """Put a region in place of its blocks."""
    indices = list(leaves((region,)))
    runner = Runner(region, {index: blocks[index] for index in indices}, dropout)
    for index in indices:
        member = Last if index == indices[-1] else Passed
        blocks[index] = member(blocks[index], index, runner)
