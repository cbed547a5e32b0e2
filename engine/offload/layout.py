"""Where each tensor of a unit lies in its tier. Torch-free, so that predictions count the same bytes.

A unit is what moves as a whole: the parameters of one block, or those outside the blocks. Its weights come first and
its states (master copy, moments) after them, each part starting at a page, so that either can be read alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.recipes import BLOCK_8BIT, DTYPE_BYTES, MOMENTS, Recipe
from engine.units import format_bytes

PAGE_BYTES = 4096
TENSOR_BYTES = 64  # every tensor starts at a cache line

LANDING_BUFFERS = 3  # units whose gradients may wait in host memory while others are updated
ADDEND_BUFFERS = 2  # a later micro-batch's gradient lands while the one before is added
STATE_BUFFERS = 3  # one unit is read ahead, one is updated, one is written behind
PARCELS_AHEAD = 2  # storages of activations on their way up while backward uses the current one
WEIGHT_BUFFERS = 2  # one block's weights go to the device while the next block's are read


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor inside a unit."""

    kind: str
    """`weight`, `master`, `moment`, `scale` or `step`."""
    offset: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """The pieces of each parameter in turn, and the bytes of the two parts."""

    parameters: tuple[tuple[Piece, ...], ...]
    weight_bytes: int
    state_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes


def clipping_note(gradient_bytes: int) -> str:
    """What gradient clipping costs an optimizer that would update beside backward."""
    return (
        "max_grad_norm needs the norm of all gradients before the first update: none runs beside backward, and "
        f"{format_bytes(gradient_bytes)} of gradients wait in host memory"
    )


def pool_bytes(sizes: Iterable[int], buffers: int) -> int:
    """Host memory that holds the `buffers` largest of these sizes at once, each in whole pages."""
    return sum(sorted(map(_pages, sizes), reverse=True)[:buffers])


def landing_bytes(sizes: Sequence[int], *, few: bool) -> int:
    """Room for gradients on their way, of units of these weight bytes: `few` where updates run beside backward, else
    for all of them."""
    return pool_bytes(sizes, LANDING_BUFFERS if few else len(sizes))


def addend_bytes(largest: int, accumulation: int) -> int:
    """Room for the gradients of later micro-batches, at most `largest` bytes each."""
    return pool_bytes([largest] * ADDEND_BUFFERS, ADDEND_BUFFERS) if accumulation > 1 else 0


def unit_layout(shapes: Sequence[tuple[int, ...]], recipe: Recipe, optimizer: str) -> UnitLayout:
    """Lay out a unit whose parameters have these shapes."""
    pieces: list[list[Piece]] = []
    end = 0
    for shape in shapes:
        weight, end = _place("weight", end, shape, recipe.weight)
        pieces.append([weight])
    weight_bytes = end = _pages(end)
    for shape, own in zip(shapes, pieces, strict=True):
        for kind, size, dtype in _states(shape, recipe, optimizer):
            piece, end = _place(kind, end, size, dtype)
            own.append(piece)
    return UnitLayout(tuple(tuple(own) for own in pieces), weight_bytes, _pages(end) - weight_bytes)


def _states(shape: tuple[int, ...], recipe: Recipe, optimizer: str) -> list[tuple[str, tuple[int, ...], str]]:
    """(kind, shape, dtype) of what `engine.optimizers.make_slot` keeps for one parameter."""
    states: list[tuple[str, tuple[int, ...], str]] = [("master", shape, "fp32")] if recipe.master else []
    if optimizer == "adamw-8bit":
        count = _elements(shape)
        states += [("moment", (count,), "int8"), ("scale", (-(-count // BLOCK_8BIT),), "fp32")] * 2
    else:
        states += [("moment", shape, recipe.moment)] * MOMENTS[optimizer]
    return states + ([("step", (), "fp32")] if MOMENTS[optimizer] else [])


def _place(kind: str, start: int, shape: tuple[int, ...], dtype: str) -> tuple[Piece, int]:
    """A piece at `start`, and where the next one may start."""
    count = _elements(shape) * DTYPE_BYTES[dtype]
    return Piece(kind, start, shape, dtype), -(-(start + count) // TENSOR_BYTES) * TENSOR_BYTES


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _pages(count: int) -> int:
    return -(-count // PAGE_BYTES) * PAGE_BYTES
