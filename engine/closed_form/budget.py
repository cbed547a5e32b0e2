"""`budget-F`: the fastest mix of block policies whose saved activations are at most F of `none`'s.

All blocks are equal, so the best mix lies on the lower hull of (bytes kept, seconds run again) over the policies of
one block: at most two neighbours of the hull, so many blocks of each.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations, pairwise

from engine.catalog import gpu
from engine.checkpoint_names import OP_GROUPS
from engine.closed_form.block import block_tape
from engine.closed_form.hardware import rates
from engine.closed_form.ops import Context
from engine.closed_form.schedule import Leaf, Node, Schedule, Segment, segments
from engine.closed_form.tape import total_bytes
from engine.closed_form.timing import again_work

REFERENCE_CARD = "a100-80gb-sxm"
"""Whose rates weigh arithmetic against memory traffic where no card is named."""

Option = tuple[int, float, Node]
"""(bytes kept, seconds run again, policy) of one block."""


@lru_cache(1024)
def options(context: Context, card: str) -> tuple[Option, ...]:
    """The lower hull of one block's policies, most bytes first."""
    tape = block_tape(context)
    present = [group for group in OP_GROUPS if any(op.group == group for op in tape.ops)]
    nodes: list[Node] = [Segment(((Leaf(), 1),))]
    for size in range(len(present) + 1):
        nodes += [Leaf(frozenset(groups)) for groups in combinations(present, size)]
    boundary = next(iter(tape.inputs.values())).bytes
    achieved = rates(gpu(card), 1)
    best: dict[int, tuple[float, Node]] = {}
    for node in nodes:
        kept = total_bytes(tape.kept(node.recomputed).values()) if isinstance(node, Leaf) else boundary
        seconds = again_work(tape, [(node, 1)], achieved).seconds
        if kept not in best or seconds < best[kept][0]:
            best[kept] = (seconds, node)
    return _lower_hull([(kept, seconds, node) for kept, (seconds, node) in sorted(best.items())])


def _lower_hull(points: list[Option]) -> tuple[Option, ...]:
    """Points in order of bytes -> those that no mix of others beats, most bytes first."""
    hull: list[Option] = []
    for point in points:
        while len(hull) > 1 and _above(hull[-2], hull[-1], point):
            hull.pop()
        if not hull or point[1] < hull[-1][1]:
            hull.append(point)
    return tuple(reversed(hull))


def _above(left: Option, middle: Option, right: Option) -> bool:
    """Whether `middle` lies on or above the line from `left` to `right`."""
    return (middle[1] - left[1]) * (right[0] - left[0]) >= (right[1] - left[1]) * (middle[0] - left[0])


def budget_schedule(context: Context, layers: int, kept_bytes: int, card: str) -> Schedule:
    """The fastest schedule whose blocks keep at most `kept_bytes`; the leanest there is where none does."""
    hull = options(context, card)
    for roomy, lean in pairwise(hull):
        if lean[0] * layers <= kept_bytes:
            if roomy[0] * layers <= kept_bytes:
                return [(roomy[2], layers)]
            count = (kept_bytes - lean[0] * layers) // (roomy[0] - lean[0])
            return [(node, times) for node, times in ((lean[2], layers - count), (roomy[2], count)) if times]
    boundary = hull[-1][0]
    length = next((k for k in range(1, layers + 1) if -(-layers // k) * boundary <= kept_bytes), layers)
    return segments(layers, length)
