"""ZeRO-3 by FSDP2: what one rank gathers, and what it holds while it scatters gradients, as a step walks.

A block's shards are gathered into one buffer and copied out of it. In forward the buffer lives until the next block's
has been gathered; backward gathers one block ahead. A block's gradients are copied into one buffer to be scattered,
which lives until the next block's are. The parameters outside the blocks stay whole from forward until the end.

On CUDA the gathered buffers and the scattered gradients are allocated on side streams (torch,
`_fsdp_collectives.py`: `all_gather_copy_in_stream`, `reduce_scatter_stream`), and the caching allocator hands a
stream's freed memory to that stream alone: what each pool once needed stays reserved beside what the rest needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.architecture import Architecture, parameter_table
from engine.closed_form.walk import Meter
from engine.recipes import DTYPE_BYTES

EMBEDDING = "embedding.weight"


@dataclass(frozen=True, slots=True)
class Wrapping:
    """How a trainer applies FSDP2. The defaults are Remat's own (`engine.sharding.zero`); published runs differ
    (`engine.validate.trainers`)."""

    fp32: bool = False
    """`MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32)` on fp32 parameters: shards and sharded gradients
    have 4 bytes an element, and there is no master copy beside the shards."""
    embedding_apart: bool = False
    """The embedding is resharded after its forward; of what is outside the blocks only norm and head stay whole."""
    staying: int = 0
    """How many of the last blocks are not resharded after forward."""
    scatter_input_aside: bool = False
    """The buffer that gradients are scattered from is allocated on the scatter stream (torch before pytorch #129721,
    June 2024)."""


OURS = Wrapping()


def padded_bytes(arch: Architecture, dtype: str, ranks: int, *, blocks: bool, only: str = "") -> int:
    """Bytes of all blocks' parameters, or of the others' (or of the one named), each padded to whole rows for every
    rank."""
    chosen = (p for p in parameter_table(arch) if p.in_block == blocks and only in ("", p.name))
    rows = ((p, -(-p.shape[0] // ranks) * ranks) for p in chosen)
    return sum(count * (p.elements // p.shape[0]) * p.count for p, count in rows) * DTYPE_BYTES[dtype]


@dataclass
class Pool:
    """The memory of one side stream: what is live in it, and the most that ever was."""

    meter: Meter
    category: str
    live: int = 0
    peak: int = 0

    def add(self, count: int) -> None:
        """`count` bytes more (or, negative, fewer) are live in this pool."""
        self.adopt(count)
        self.meter.add(self.category, count)

    def adopt(self, count: int) -> None:
        """Bytes that the meter counts already belong to this pool."""
        self.live += count
        self.peak = max(self.peak, self.live)
        self.meter.aside += count


@dataclass
class Gathering:
    """The buffers of one rank. `block`, `rest` and `embedding` are padded bytes, whole and in the dtype that is
    gathered, of one block, of what is outside the blocks, and of the embedding where it is a group apart."""

    meter: Meter
    block: int
    rest: int
    ranks: int
    accumulated: bool
    """Sharded gradients exist from before: what is scattered is added to them."""
    wrapping: Wrapping = OURS
    embedding: int = 0
    held: int = 0
    """The buffer that forward has gathered into last."""
    ahead: int = 0
    """The buffer that backward has gathered ahead."""
    staying: int = 0
    """Blocks that are whole since forward."""
    scattering: int = 0
    """The gradients that are scattered, or were last."""
    remaining: int = 0
    """Blocks whose backward is still to come."""
    gathered: Pool = field(init=False)
    scattered: Pool = field(init=False)

    def __post_init__(self) -> None:
        self.gathered = Pool(self.meter, "temporaries")
        self.scattered = Pool(self.meter, "gradients")

    @property
    def side_pools_bytes(self) -> int:
        """What the side streams' pools keep reserved."""
        return self.gathered.peak + self.scattered.peak

    @property
    def head(self) -> int:
        """What is outside the blocks and stays whole from the end of forward."""
        return self.rest - self.embedding

    def start_forward(self, layers: int) -> None:
        self.remaining, self.held = layers, self.embedding or self.rest
        self.gathered.add(self.held)
        self.meter.add("parameters", self.held)
        self.meter.add("parameters", -self.embedding)

    def before_block(self) -> None:
        self.gathered.add(self.block)
        self.gathered.add(-self.held)
        self.held = self.block
        self.meter.add("parameters", self.block)

    def after_block(self) -> None:
        self.meter.add("parameters", -self.block)

    def end_forward(self) -> None:
        self.staying = self.wrapping.staying
        self.meter.add("parameters", self.block * self.staying)
        if self.embedding:
            self.gathered.add(self.head)
            self.meter.add("parameters", self.head)
            self.gathered.add(-self.head)
        self.gathered.add(-self.held)
        self.held = 0

    def start_backward(self) -> None:
        self._gather_ahead(0 if self.staying else self.block)

    def after_head(self, gradient: int) -> None:
        """Where the embedding is apart, the gradients (bytes) of norm and head are complete first of all."""
        if self.embedding:
            self.meter.add("parameters", -self.head)
            self._scatter(self.head, gradient)

    def before_backward(self, layers: int) -> None:
        """`layers` blocks whose inside is needed at once: the last was gathered ahead, or is whole since forward."""
        self.remaining -= layers
        whole = min(self.staying, layers)
        self.staying -= whole
        self.meter.add("parameters", self.block * (layers - whole))
        following = self.block if self.remaining and not self.staying else 0
        self._gather_ahead(following)  # once this buffer has been copied out of

    def _gather_ahead(self, count: int) -> None:
        self.gathered.add(count - self.ahead)
        self.ahead = count

    def skip(self, layers: int, *, inside: bool) -> None:
        """Backward of blocks that nobody looks at; `inside` a segment, which has gathered them."""
        whole = layers if inside else min(self.staying, layers)
        if not inside:
            self.remaining -= layers
            self.staying -= whole
        self.meter.add("parameters", -self.block * whole)
        if not self.accumulated:
            self.scattered.add(self._reduced(self.block) // self.ranks * layers)

    def after_backward(self, gradient: int) -> None:
        """A block's gradients (bytes) are complete."""
        self.meter.add("parameters", -self.block)
        self._scatter(self.block, gradient)

    def finish(self, gradient: int) -> None:
        """Those of the embedding, or of all that is outside the blocks, are: the last of all."""
        last = self.embedding or self.rest
        if not self.embedding:
            self.meter.add("parameters", -last)
        self._scatter(last, gradient)
        self._hold(0)

    def _scatter(self, whole: int, gradient: int) -> None:
        reduced = self._reduced(whole)
        self._hold(reduced)
        self.meter.add("gradients", -gradient)
        self.scattered.add(reduced // self.ranks)
        if self.accumulated:
            self.scattered.add(-(reduced // self.ranks))

    def _reduced(self, whole: int) -> int:
        """Bytes in the dtype of the reduction."""
        return whole * 2 if self.wrapping.fp32 else whole

    def _hold(self, count: int) -> None:
        """The one buffer that gradients are scattered from."""
        if self.wrapping.scatter_input_aside:
            self.scattered.adopt(count - self.scattering)
        self.meter.add("temporaries", count - self.scattering)
        self.scattering = count
