"""ZeRO-3 by FSDP2: what one rank gathers, and what it holds while it scatters gradients, as a step walks.

A block's shards are gathered into one buffer and copied out of it. In forward the buffer lives until the next block's
has been gathered; backward gathers one block ahead. A block's gradients are copied into one buffer to be scattered,
which lives until the next block's are. The parameters outside the blocks stay whole from forward until the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.architecture import Architecture, parameter_table
from engine.closed_form.walk import Meter
from engine.recipes import DTYPE_BYTES


def padded_bytes(arch: Architecture, dtype: str, ranks: int, *, blocks: bool) -> int:
    """Bytes of all blocks' parameters, or of the others', each padded to whole rows for every rank."""
    rows = ((p, -(-p.shape[0] // ranks) * ranks) for p in parameter_table(arch) if p.in_block == blocks)
    return sum(count * (p.elements // p.shape[0]) * p.count for p, count in rows) * DTYPE_BYTES[dtype]


@dataclass
class Gathering:
    """The buffers of one rank. `block` and `rest` are padded bytes of one block and of what is outside the blocks."""

    meter: Meter
    block: int
    rest: int
    ranks: int
    accumulated: bool
    """Sharded gradients exist from before: what is scattered is added to them."""
    held: int = 0
    """The buffer that forward has gathered into last."""
    scattering: int = 0
    """The gradients that are scattered, or were last."""
    remaining: int = 0
    """Blocks whose backward is still to come."""

    def start_forward(self, layers: int) -> None:
        self.remaining, self.held = layers, self.rest
        self.meter.add("temporaries", self.held)
        self.meter.add("parameters", self.rest)

    def before_block(self) -> None:
        self.meter.add("temporaries", self.block)
        self.meter.add("temporaries", -self.held)
        self.held = self.block
        self.meter.add("parameters", self.block)

    def after_block(self) -> None:
        self.meter.add("parameters", -self.block)

    def end_forward(self) -> None:
        self.meter.add("temporaries", -self.held)
        self.held = 0

    def start_backward(self) -> None:
        self.meter.add("temporaries", self.block)

    def before_backward(self, layers: int) -> None:
        """`layers` blocks whose inside is needed at once: the last was gathered ahead."""
        self.remaining -= layers
        self.meter.add("parameters", self.block * layers)
        if self.remaining:
            self.meter.blip(self.block)  # the next buffer is there before this one goes
        else:
            self.meter.add("temporaries", -self.block)

    def skip(self, layers: int) -> None:
        """Backward of blocks that nobody looks at."""
        self.remaining -= layers

    def after_backward(self, gradient: int) -> None:
        """A block's gradients (bytes) are complete."""
        self.meter.add("parameters", -self.block)
        self._scatter(self.block, gradient)

    def finish(self, gradient: int) -> None:
        """Those outside the blocks are: the last of all."""
        self.meter.add("parameters", -self.rest)
        self._scatter(self.rest, gradient)
        self.meter.add("temporaries", -self.scattering)

    def _scatter(self, buffer: int, gradient: int) -> None:
        self.meter.add("temporaries", buffer - self.scattering)
        self.scattering = buffer
        self.meter.add("gradients", -gradient)
        if self.accumulated:
            self.meter.blip(buffer // self.ranks)
        else:
            self.meter.add("gradients", buffer // self.ranks)
