"""The optimizer in a lower tier (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857).

Gradients go down as backward makes them and leave the device at once. When all of a unit's have landed, its update
runs beside the rest of backward: states loaded, the same update rule as on the device, weights copied up, states
stored. Without overlap the same happens one thing after another, the updates only after backward. With clipping the
norm of all gradients comes first: no update runs beside backward, and all gradients wait on the host.

Updating weights while backward still runs is safe: a parameter's gradient is complete only once every node that
reads the parameter has run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from engine.offload.layout import LANDING_BUFFERS, addend_bytes, landing_bytes
from engine.offload.link import Copy, Lane, Link
from engine.offload.states import Buffers, States, Unit
from engine.offload.tiers import Arena, HostBlock
from engine.optimizers import DTYPES, Slot, clip, fused_adamw, update
from engine.recipes import Recipe
from engine.spec import Optimizer as OptimizerName

Observer = Callable[[str, Tensor], None]
"""Told of `grad` and a gradient when it is born, of `param` and `free` and a parameter when its storage is filled and
emptied."""


Deliver = Callable[[Unit, list[Slot]], list[Copy]]
"""Takes a unit's new weights from its slots to where the next step looks for them; the copies to wait for."""


def unobserved(_kind: str, _tensor: Tensor) -> None:
    """The observer of a step that nobody watches."""


@dataclass(eq=False)
class Landing:
    """Host memory for one unit's gradients, in their own dtype, and the copies on their way to it."""

    block: HostBlock
    copies: list[Copy] = field(default_factory=list)
    arrived: dict[int, int] = field(default_factory=dict)
    """How many micro-batches' gradients arrived, by the parameter's index in its unit."""


class OffloadedOptimizer:
    """Updates `units` in the tier that `states` stands for. Expects one backward pass a micro-batch."""

    buffers: Sequence[Tensor] = ()
    """On the device it keeps none between steps."""

    def __init__(
        self,
        units: Sequence[Unit],
        states: States,
        link: Link,
        arena: Arena,
        *,
        recipe: Recipe,
        optimizer: OptimizerName,
        accumulation: int = 1,
        deliver: Deliver,
        max_norm: float | None = None,
        order: Iterable[Tensor] = (),
    ) -> None:
        """`deliver` takes a unit's new weights to where the next step looks for them.
        `max_norm` clips the global gradient norm, which is known only when backward is over: no update then runs
        beside it. `order`: that of the parameters on the device, in which the norm is summed there.
        """
        self.states, self.link = states, link
        self.optimizer, self.accumulation = optimizer, accumulation
        self.deliver, self.max_norm = deliver, max_norm
        self.order = {parameter: index for index, parameter in enumerate(order)}
        self.one_call = optimizer == "adamw" and recipe.weight == recipe.moment and not recipe.master
        self.weight_dtype = DTYPES[recipe.weight]
        self.observer: Observer = unobserved
        # Beside backward on a CPU the update shares its cores; beside a GPU's, or alone, they are all its own.
        share = 2 if link.overlap and not link.cuda else 1
        threads = max(1, torch.get_num_threads() // share)
        self.lane = Lane("remat-update", threads=threads, simulated=link.simulated)
        self.early = link.overlap and max_norm is None
        weight_bytes = [unit.layout.weight_bytes for unit in units]
        self.few = self.early and accumulation == 1
        self.landing_buffers = Buffers(arena, landing_bytes(weight_bytes, few=self.few))
        self.landings: dict[Unit, Landing] = {}
        self.pending: list[Future[Any]] = []
        self.arithmetic_seconds = 0.0
        widest = max(parameter.numel() for unit in units for parameter in unit.parameters)
        wide = not self.one_call and self.weight_dtype != torch.float32
        self.scratch = arena.take(4 * widest) if wide else None
        self.addends = Buffers(arena, addend_bytes(widest * self.weight_dtype.itemsize, accumulation))
        for unit in units:
            for index, parameter in enumerate(unit.parameters):
                parameter.register_post_accumulate_grad_hook(partial(self._arrive, unit, index))

    def _arrive(self, unit: Unit, index: int, parameter: Tensor) -> None:
        """A gradient is complete: send it down and free it."""
        grad = parameter.grad
        assert grad is not None
        self.observer("grad", grad)
        with self.link.ledger.waiting():
            landing = self.landings.get(unit) or self._new_landing(unit)
            if index not in landing.arrived:
                landing.copies.append(self.link.down(grad, landing.block, unit.layout.parameters[index][0].offset))
            else:
                addend = self.addends.take(grad.nbytes)
                copy = self.link.down(grad, addend)
                self.pending.append(self.lane.submit(self._add, unit, landing, index, addend, copy))
                if self.link.simulated:
                    self.addends.give(addend)
        landing.arrived[index] = landing.arrived.get(index, 0) + 1
        parameter.grad = None
        if self.early and list(landing.arrived.values()) == [self.accumulation] * len(unit.parameters):
            self._launch(unit)

    def _new_landing(self, unit: Unit) -> Landing:
        """Room for a unit's gradients. Units with a weight that gets none never complete: the first of them goes on its
        way with what it has, before they take all the room (the rest of the model, which always waits, included)."""
        if self.few and len(self.landings) >= LANDING_BUFFERS - 1:
            self._launch(next(iter(self.landings)))
            self._drain()
        landing = self.landings[unit] = Landing(self.landing_buffers.take(unit.layout.weight_bytes))
        return landing

    def _add(self, unit: Unit, landing: Landing, index: int, addend: HostBlock, copy: Copy) -> None:
        """Add a later micro-batch's gradient to what has landed, in the order in which the device would."""
        try:
            for earlier in [*landing.copies, copy]:
                earlier.wait()
            total = self._gradients(unit, landing)[index]
            total.add_(addend.view(0, tuple(total.shape), total.dtype))
        finally:
            self.addends.give(addend)

    def _gradients(self, unit: Unit, landing: Landing) -> list[Tensor]:
        pieces = [pieces[0] for pieces in unit.layout.parameters]
        return [landing.block.view(piece.offset, piece.shape, self.weight_dtype) for piece in pieces]

    def _launch(self, unit: Unit) -> None:
        self.states.prefetch(unit)
        landing = self.landings.pop(unit)
        if self.link.simulated:
            self.landing_buffers.give(landing.block)
            self.states.store(unit)
        self.pending.append(self.lane.submit(self._update, unit, landing))

    @torch.no_grad()
    def _update(self, unit: Unit, landing: Landing) -> list[Copy]:
        """One unit's update, on the background thread. Returns the copies of its new weights to the device."""
        try:
            for copy in landing.copies:
                copy.wait()
            slots = self.states.load(unit)
            start = time.perf_counter()
            gradients = self._gradients(unit, landing)
            self._apply([(slots[index], gradients[index]) for index in sorted(landing.arrived)])
            self.arithmetic_seconds += time.perf_counter() - start
        finally:  # also where the disk failed: backward may be waiting for the room, and must come to its end
            self.landing_buffers.give(landing.block)
        copies = self.deliver(unit, slots)
        for copy in copies:
            copy.wait()
        self.states.store(unit)
        return copies

    def _apply(self, ready: list[tuple[Slot, Tensor]]) -> None:
        if self.one_call:
            fused_adamw([slot.parameter for slot, _ in ready], [grad for _, grad in ready], [slot for slot, _ in ready])
            return
        for slot, grad in ready:
            if self.scratch is not None:
                grad = self.scratch.view(0, tuple(grad.shape), torch.float32).copy_(grad)
            update(slot, grad, self.optimizer)

    @torch.no_grad()
    def step(self) -> None:
        """Finish the updates. Afterwards compute sees the new weights, and no gradient is left."""
        if self.max_norm is not None and not self.link.simulated:
            self._clip(self.max_norm)
        start, arithmetic = time.perf_counter(), self.arithmetic_seconds
        for unit in list(self.landings):
            self._launch(unit)
            if not self.link.overlap:
                self._drain()
        self._drain()
        self.states.check()
        waited = time.perf_counter() - start - (self.arithmetic_seconds - arithmetic)
        self.link.ledger.waited(max(0.0, waited))

    def _drain(self) -> None:
        for future in self.pending:
            for copy in future.result() or ():
                copy.join()
        self.pending.clear()

    def _clip(self, max_norm: float) -> None:
        """Scale the gradients where they landed, summed in the device's order: the same bits."""
        with self.link.ledger.waiting():
            self._drain()
            for landing in self.landings.values():
                for copy in landing.copies:
                    copy.wait()
        landed = [
            (self.order.get(unit.parameters[index], 0), grad)
            for unit, landing in self.landings.items()
            for index, grad in enumerate(self._gradients(unit, landing))
            if index in landing.arrived
        ]
        clip([grad for _, grad in sorted(landed, key=itemgetter(0))], max_norm)

    def tensors(self) -> list[Tensor]:
        """Optimizer states on the device: none."""
        return []

    def close(self) -> None:
        for buffers in (self.landing_buffers, self.addends):
            buffers.close()
        self.lane.close()
