"""A block's weights are on the device only while the block runs (ZeRO-Infinity, arXiv 2104.07857).

Dropping a weight empties its storage and leaves the tensor: whatever autograd saved of it shares the storage and is
whole again once it is filled. A block is fetched before it runs forward (also when it is recomputed) and before its
backward; a weight is dropped after the block's forward, or in backward once its gradient is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.offload.link import Copy, Link
from engine.offload.optimizer import Observer, unobserved
from engine.offload.states import Unit


class Weights(Protocol):
    """Where the weights are when they are not on the device."""

    def fetch(self, unit: Unit) -> list[Copy]:
        """Start copying the unit's weights to its parameters, whose storage is there. From the training thread."""


def in_backward() -> bool:
    """Whether the autograd engine is running, so that a block's forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class ParameterOffload:
    """Fetches and drops the weights of `blocks`, one unit each.

    What comes next is learned from the last time: after each (block, direction) the next one fetched is remembered
    and fetched ahead, whatever the checkpoint policy's order is.
    """

    def __init__(self, blocks: Sequence[nn.Module], units: Sequence[Unit], weights: Weights, link: Link) -> None:
        self.units, self.weights, self.link = list(units), weights, link
        self.observer: Observer = unobserved
        self.resident: dict[Unit, list[Copy]] = {}
        self.bytes = {parameter: parameter.nbytes for unit in units for parameter in unit.parameters}
        self.running: Unit | None = None
        """The unit whose backward runs: it stays while its inside is recomputed."""
        self.previous: tuple[Unit, str] | None = None
        self.successor: dict[tuple[Unit, str], Unit] = {}
        for block, unit in zip(blocks, units, strict=True):
            block.register_forward_pre_hook(partial(self._before_forward, unit))
            block.register_forward_hook(partial(self._after_forward, unit))
            for parameter in unit.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._after_gradient, unit))

    def _before_forward(self, unit: Unit, _block: nn.Module, _inputs: Any) -> None:
        self._need(unit, "recompute" if in_backward() else "forward")

    def _after_forward(self, unit: Unit, _block: nn.Module, _inputs: Any, output: Tensor) -> None:
        if in_backward():
            if unit is not self.running:
                self.drop(unit)
            return
        if output.requires_grad:
            output.register_hook(partial(self._before_backward, unit))
            if unit is self.units[-1]:
                return  # its backward comes first
        self.drop(unit)

    def _before_backward(self, unit: Unit, _grad: Tensor) -> None:
        self.running = unit
        self._need(unit, "backward")

    def _after_gradient(self, unit: Unit, parameter: Tensor) -> None:
        self._empty(unit, parameter)
        if all(member.untyped_storage().nbytes() == 0 for member in unit.parameters):
            self.resident.pop(unit, None)

    def _need(self, unit: Unit, direction: str) -> None:
        self._fetch(unit)
        with self.link.ledger.waiting():
            for copy in self.resident[unit]:
                copy.join()
        self.resident[unit] = []
        if self.previous is not None:
            self.successor[self.previous] = unit
        self.previous = (unit, direction)
        if self.link.overlap and (ahead := self.successor.get(self.previous)):
            self._fetch(ahead)

    @torch.no_grad()
    def _fetch(self, unit: Unit) -> None:
        if unit not in self.resident:
            self.allocate(unit)
            self.resident[unit] = self.weights.fetch(unit)

    def allocate(self, unit: Unit) -> None:
        """Give the unit's weights memory on the device, content unknown."""
        for parameter in unit.parameters:
            parameter.untyped_storage().resize_(self.bytes[parameter])
            self.observer("param", parameter)

    def drop(self, unit: Unit) -> None:
        """Free the unit's weights on the device."""
        for parameter in unit.parameters:
            self._empty(unit, parameter)
        self.resident.pop(unit, None)

    def _empty(self, unit: Unit, parameter: Tensor) -> None:
        for copy in self.resident.get(unit, ()):
            copy.wait()
        self.observer("free", parameter)
        parameter.untyped_storage().resize_(0)

    def end_step(self) -> None:
        """Drop what is left (a weight without a gradient); the next step starts from updated weights."""
        for unit in list(self.resident):
            self.drop(unit)
        self.running = self.previous = None
