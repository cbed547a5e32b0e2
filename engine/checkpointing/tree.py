"""What a policy does to a list of blocks, as data. Torch-free: solvers make it, `apply` runs it, pages describe it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Keep:
    """A block whose saved tensors stay."""

    block: int


@dataclass(frozen=True, slots=True)
class Selective:
    """A block that keeps what backward needs, less what the ops of `groups` make: those ops run again."""

    block: int
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """Consecutive blocks of which only the first one's input stays; `inside` is what their second run keeps."""

    inside: tuple[Keep | Region, ...]


Node = Keep | Selective | Region
Tree = tuple[Node, ...]
"""Every block once, in order."""


def leaves(nodes: Iterable[Node]) -> Iterator[int]:
    """The blocks below `nodes`, in order."""
    for node in nodes:
        if isinstance(node, Region):
            yield from leaves(node.inside)
        else:
            yield node.block


def segments(layers: int, length: int) -> Tree:
    """Regions of `length` blocks; the last one is shorter where that does not divide."""
    starts = range(0, layers, length)
    return tuple(Region(tuple(Keep(block) for block in range(s, min(s + length, layers)))) for s in starts)


def nested(layers: int) -> Tree:
    """Recursive halving: at most ⌈log₂ L⌉ + 1 inputs stay at any level, each block runs at most ⌈log₂ L⌉ + 1 times
    again.

    Griewank 1992 (Optimization Methods and Software 1:35) for the idea, Chen et al. 2016 (arXiv 1604.06174, section
    4.3) for O(log L) memory at O(L log L) compute.
    """
    *regions, last = _halve(0, layers)
    return (*regions, Region((last,)))


def _halve(first: int, stop: int) -> tuple[Keep | Region, ...]:
    """The first half as a region of its own, then the second half split further; the last block stands bare, since
    its backward follows at once."""
    if stop - first == 1:
        return (Keep(first),)
    middle = (first + stop) // 2
    return (Region(_halve(first, middle)), *_halve(middle, stop))


def describe(tree: Sequence[Node]) -> str:
    """`blocks 0-7 recompute norms + attention-core; 8-11 keep all`."""
    parts: list[str] = []
    done = 0
    for what, group in groupby(tree, key=_what):
        nodes = list(group)
        first, done = done, done + sum(1 for _ in leaves(nodes))
        span = f"{first}-{done - 1}" if done - first > 1 else f"{first}"
        times = f"{len(nodes)} × " if what.startswith("(") and len(nodes) > 1 else ""
        parts.append(f"{span} {times}{what}")
    return "blocks " + "; ".join(parts)


def _what(node: Node) -> str:
    if isinstance(node, Keep):
        return "keep all"
    if isinstance(node, Selective):
        return "recompute " + " + ".join(node.groups)
    return "recompute each" if len(node.inside) == 1 else _shape(node)


def _shape(node: Keep | Region) -> str:
    """(1 (2 1)): a region in brackets, bare blocks counted."""
    if isinstance(node, Keep):
        return "1"
    parts = []
    for bare, group in groupby(node.inside, key=lambda child: isinstance(child, Keep)):
        children = list(group)
        parts += [str(len(children))] if bare else [_shape(child) for child in children]
    return f"({' '.join(parts)})"
