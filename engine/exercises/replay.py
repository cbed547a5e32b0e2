"""A checkpoint policy played block by block: what is alive at each moment of forward and backward.

Played from the predictor's own schedule of the policy, so that the Learn page shows what the engine does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.closed_form.schedule import Leaf, Node, Schedule, Segment

Action = Literal["forward", "recompute", "backward"]


@dataclass(frozen=True, slots=True)
class Frame:
    """One block at work. `inputs` are the blocks whose input is kept, `inside` those whose saved tensors are alive."""

    action: Action
    block: int
    inputs: tuple[int, ...]
    inside: tuple[int, ...]

    def alive_bytes(self, boundary_bytes: float, layer_bytes: float) -> float:
        """Inputs kept and layers held; the saved tensors of a held layer include its own input."""
        return len(set(self.inputs) - set(self.inside)) * boundary_bytes + len(self.inside) * layer_bytes


@dataclass
class _Stage:
    frames: list[Frame] = field(default_factory=list)
    inputs: set[int] = field(default_factory=set)
    inside: set[int] = field(default_factory=set)

    def show(self, action: Action, block: int, working: bool = False) -> None:
        """Record the moment; `working`: the block's tensors are alive only while it runs."""
        inside = self.inside | ({block} if working else set())
        self.frames.append(Frame(action, block, tuple(sorted(self.inputs)), tuple(sorted(inside))))

    def forward(self, nodes: Sequence[Node], first: int, action: Action) -> None:
        for node, start in _placed(nodes, first):
            if isinstance(node, Leaf):
                self.inside.add(start)
                self.show(action, start)
            else:
                self.inputs.add(start)
                for block in range(start, start + node.layers):
                    self.show(action, block, working=True)

    def backward(self, nodes: Sequence[Node], first: int) -> None:
        for node, start in reversed(list(_placed(nodes, first))):
            if isinstance(node, Segment):
                inner = _flat(node.inside)
                self.forward(inner, start, "recompute")
                self.backward(inner, start)
                self.inputs.discard(start)
            else:
                self.show("backward", start)
                self.inside.discard(start)


def _flat(schedule: Schedule) -> list[Node]:
    return [node for node, count in schedule for _ in range(count)]


def _placed(nodes: Sequence[Node], first: int) -> Iterator[tuple[Node, int]]:
    """Each node with the index of its first block."""
    for node in nodes:
        yield node, first
        first += node.layers


def replay(schedule: Schedule) -> list[Frame]:
    """Forward from the first block to the last, then backward, recomputing where the policy says so."""
    stage = _Stage()
    nodes = _flat(schedule)
    stage.forward(nodes, 0, "forward")
    stage.backward(nodes, 0)
    return stage.frames
