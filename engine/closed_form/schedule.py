"""Checkpoint policies as a schedule: which nodes keep what between forward and backward, and how a run of equal nodes
is walked without visiting each one.

A leaf is a block that keeps its saved tensors. A segment keeps its input and recomputes its inside in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

from engine.checkpointing.tree import Node as TreeNode
from engine.checkpointing.tree import Region, Selective, Tree
from engine.closed_form.gathering import Gathering
from engine.closed_form.tape import Tape, Tensor, total_bytes
from engine.closed_form.walk import Backward, Meter, run_forward

SMALLEST_PARCEL = 2**20
"""Below this a transfer's fixed cost outweighs what it frees: smaller tensors stay on the device."""


@dataclass(frozen=True)
class Leaf:
    """A block that keeps what its tape saves, less what the ops of the `recomputed` groups make."""

    recomputed: frozenset[str] = frozenset()

    @property
    def layers(self) -> int:
        return 1


@dataclass(frozen=True)
class Segment:
    """Nodes inside one checkpoint."""

    inside: tuple[tuple[Node, int], ...]

    @property
    def layers(self) -> int:
        return sum(node.layers * count for node, count in self.inside)


Node = Leaf | Segment
Schedule = Sequence[tuple[Node, int]]
"""Runs of equal nodes: (node, how many), first to last."""


def segments(layers: int, length: int) -> Schedule:
    """Segments of `length` blocks; the last one is shorter where it does not divide."""
    whole, rest = divmod(layers, length)
    runs: list[tuple[Node, int]] = [(Segment(((Leaf(), length),)), whole)] if whole else []
    return [*runs, (Segment(((Leaf(), rest),)), 1)] if rest else runs


def nested(layers: int) -> Schedule:
    """Recursive halving: O(log L) inputs stay at any level (Griewank 1992; Chen et al. 2016, arXiv 1604.06174, 4.3)."""
    *regions, last = _halve(layers)
    return [*((region, 1) for region in regions), (Segment(((last, 1),)), 1)]


@cache
def _halve(layers: int) -> tuple[Node, ...]:
    """The first half as a segment of its own, then the second half split further; the last block stands bare."""
    if layers == 1:
        return (Leaf(),)
    first = layers // 2
    return (Segment(tuple((node, 1) for node in _halve(first))), *_halve(layers - first))


def from_tree(tree: Tree) -> Schedule:
    """A policy's tree over numbered blocks, equal neighbours counted."""
    return [(node, len(list(run))) for node, run in groupby(map(_node, tree))]


def _node(node: TreeNode) -> Node:
    if isinstance(node, Region):
        return Segment(tuple(from_tree(node.inside)))
    return Leaf(frozenset(node.groups) if isinstance(node, Selective) else frozenset())


@dataclass
class Chain:
    """The blocks of a model as one tape repeated, walked by a schedule."""

    tape: Tape
    meter: Meter
    parameter_bytes: int
    """Gradient bytes of one block."""
    accumulated: bool = False
    gradient_share: float = 1.0
    """What stays of a block's gradients once its backward is over (sharding)."""
    offloaded: bool = False
    """What is kept waits on the host, but for small tensors and the last node's."""
    parcels_ahead: int = 0
    """How many of them are on their way up while backward uses one."""
    gathering: Gathering | None = None
    """ZeRO-3's buffers."""
    fetched: bool = False
    """Weights come before a block runs, and leave as soon as their gradients are complete."""
    ahead: int = 0
    """Bytes of the next block's weights, on their way while one runs."""
    inside: bool = False
    """A segment is running again."""
    hosted: int = 0
    """Bytes on the host when forward ends."""
    first_forward: bool = True
    """Not a recomputation."""
    cached: int = 0
    """Bytes that forward leaves alive until it ends, beside what is kept."""

    @property
    def cached_bytes(self) -> int:
        """Autocast caches the bf16 copies of a block's weights until its context ends."""
        return total_bytes(t for t in self.tape.saved.values() if t.name.endswith(".weight_bf16"))

    def drop_cache(self) -> None:
        """The forward's autocast context ends."""
        self.meter.add("temporaries", -self.cached)
        self.cached, self.first_forward = 0, False

    @property
    def boundary(self) -> Tensor:
        """The block's input, which is also the shape of its output."""
        return next(iter(self.tape.inputs.values()))

    def kept_bytes(self, node: Node) -> int:
        """Bytes a node keeps between forward and backward, its input included."""
        if isinstance(node, Leaf):
            return total_bytes(self.tape.kept(node.recomputed).values())
        return self.boundary.bytes

    def hosted_bytes(self, node: Node) -> int:
        """Bytes of a node's kept tensors that are large enough to travel to the host."""
        if isinstance(node, Leaf):
            return total_bytes(t for t in self.tape.kept(node.recomputed).values() if t.bytes >= SMALLEST_PARCEL)
        return self.boundary.bytes if self.boundary.bytes >= SMALLEST_PARCEL else 0

    def _send(self, count: int) -> None:
        """Kept bytes leave the device."""
        self.meter.add("activations", -count)
        self.hosted += count

    def forward(self, schedule: Schedule, *, early_stop: bool = False) -> None:
        """Run a schedule; the input of its first node is alive, the output of its last is left alive."""
        sends = self.offloaded and self.first_forward
        near = 2 if self.ahead else 1  # before the last of all, which has nothing on its way
        for position, (node, count) in enumerate(schedule):
            passed = max(0, count - near)
            hosted = self.hosted_bytes(node) * passed if sends else 0
            self.meter.add("activations", self.kept_bytes(node) * passed - hosted)
            self.hosted += hosted
            self._cache(node, passed)
            for index in range(passed, count):
                very_last = position == len(schedule) - 1 and index == count - 1
                if very_last and self.first_forward:
                    self.meter.add("parameters", -self.ahead)
                if self.gathering and self.first_forward:
                    self.gathering.before_block()
                self._forward_node(node, early_stop and very_last)
                if self.gathering and self.first_forward:
                    self.gathering.after_block()
                if sends and not very_last:
                    self._send(self.hosted_bytes(node))

    def _forward_node(self, node: Node, final: bool) -> None:
        if isinstance(node, Leaf):
            stop = self.tape.last_saving_op if final else None
            run_forward(self.meter, self.tape, self.tape.kept(node.recomputed), stop=stop)
            return
        travelling = self.boundary.bytes if node.layers > 1 else 0
        self.meter.add("temporaries", travelling)
        run_forward(self.meter, self.tape, (), stop=None)
        self.meter.add("temporaries", -travelling)
        self._cache(node, 1)

    def _cache(self, node: Node, times: int) -> None:
        """Weight copies that a segment's inside does not keep."""
        if isinstance(node, Segment) and self.first_forward:
            count = self.cached_bytes * node.layers * times
            self.cached += count
            self.meter.add("temporaries", count)

    def backward(self, schedule: Schedule, backward: Backward) -> None:
        """Backward of a schedule whose kept tensors are alive; the gradient of its output is flowing."""
        fetches = self.offloaded and not self.inside
        # The second node finds gradients being scattered and activations on their way; the last has nothing ahead.
        near = 2 if self.gathering or self.parcels_ahead else 1
        for position, (node, count) in enumerate(reversed(schedule)):
            hosted = self.hosted_bytes(node) if fetches else 0
            first = min(count, near)
            last = min(count - first, near)
            for index in range(first + last):
                if index == first:
                    self._skip(node, count - first - last, hosted)
                if position or index:
                    self.meter.add("activations", hosted)
                before = count - 1 - (index if index < first else index + count - first - last)
                early = (
                    hosted * min(before, self.parcels_ahead) if isinstance(node, Segment) and (position or index) else 0
                )
                self.meter.add("activations", early)
                self._backward_node(node, backward)
                self.meter.add("activations", -early)

    def _skip(self, node: Node, times: int, hosted: int) -> None:
        """Backward of equal nodes that nobody looks at."""
        self.meter.add("activations", -(self.kept_bytes(node) - hosted) * times)
        if self.gathering:
            self.gathering.skip(node.layers * times, inside=self.inside)
        elif not self.accumulated:
            self.meter.add("gradients", self._kept_gradient * node.layers * times)

    @property
    def _kept_gradient(self) -> int:
        return int(self.parameter_bytes * self.gradient_share)

    def _fetched_beside(self, node: Segment) -> int:
        """Weights beside those of the running block and the next while a segment runs again: its last block's, whose
        backward comes first, stay."""
        at_work = 2 if self.ahead else 1
        return self.parameter_bytes * max(0, min(node.layers, at_work + 1) - at_work) if self.fetched else 0

    def _backward_node(self, node: Node, backward: Backward) -> None:
        if self.gathering and not self.inside:
            self.gathering.before_backward(node.layers)
        if isinstance(node, Leaf):
            backward.rename(self.boundary.name, self.tape.ops[-1].makes[0].name)
            backward.drops = self.fetched
            backward.run(self.tape, self.tape.kept(node.recomputed))
            backward.drops = False
            if self.fetched:
                self.meter.add("parameters", self.parameter_bytes)  # those of the block after the next
            if self.gathering:
                self.gathering.after_backward(self.parameter_bytes)
            elif not self.accumulated:
                self.meter.add("gradients", self._kept_gradient - self.parameter_bytes)
            return
        outer, self.inside = self.inside, True
        beside = self._fetched_beside(node)
        self.meter.add("parameters", beside)
        self.forward(node.inside, early_stop=True)
        self.meter.add("parameters", -beside)
        self.backward(node.inside, backward)
        self.inside = outer
