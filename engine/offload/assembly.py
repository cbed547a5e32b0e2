"""The parts of one run's offloading put together, from its spec."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from engine.offload.activations import ActivationOffload
from engine.offload.layout import clipping_note
from engine.offload.link import Copy, Link
from engine.offload.nvme import nvme_directory, prepare_directory
from engine.offload.optimizer import Observer, OffloadedOptimizer
from engine.offload.parameters import ParameterOffload
from engine.offload.states import HostStates, HostWeights, NvmeStates, Unit, make_units
from engine.offload.tiers import Arena, Ledger
from engine.optimizers import Slot
from engine.recipes import RECIPES
from engine.spec import RunSpec

Initialise = Callable[[str, Tensor], None]
"""Fills a parameter in place from its full name."""


def offloads(spec: RunSpec) -> bool:
    """Whether anything of this run lives below the device."""
    return {spec.offload_optimizer, spec.offload_parameters, spec.offload_activations} != {"none"}


def hollow(model: nn.Module, device: torch.device, blocks: nn.Module) -> None:
    """Move a model built on `meta` to `device`, content unknown; inside `blocks` storages are empty: shapes only."""
    inside = set(blocks.parameters())
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            real = nn.Parameter(torch.empty_like(parameter, device=device))
            if parameter in inside:
                real.untyped_storage().resize_(0)
            module.register_parameter(name, real)


class Offload:
    """Everything below the device for one run. Close it when the run ends, whatever happened.

    `blocks` are the model's blocks before a checkpoint policy wraps them. Where parameters are offloaded they are
    hollow, and each block is initialised straight into its tier: the device never holds two.
    """

    def __init__(
        self,
        spec: RunSpec,
        device: torch.device,
        model: nn.Module,
        blocks: list[nn.Module],
        initialise: Initialise | None = None,
    ) -> None:
        """`initialise` fills hollow blocks. Raises StorageError if the NVMe tier is asked for and cannot serve."""
        simulated = isinstance(next(model.parameters()), FakeTensor)
        self.ledger, self.warnings = Ledger(), list[str]()
        self.arena = Arena(self.ledger, device, simulated=simulated)
        self.link = Link(device, self.ledger, overlap=spec.offload_overlap, simulated=simulated)
        self.states: HostStates | NvmeStates | None = None
        self.optimizer: OffloadedOptimizer | None = None
        self.parameters: ParameterOffload | None = None
        self.activations: ActivationOffload | None = None
        try:
            self._assemble(spec, model, blocks, initialise)
        except BaseException:
            self.close()
            raise

    def _assemble(
        self, spec: RunSpec, model: nn.Module, blocks: list[nn.Module], initialise: Initialise | None
    ) -> None:
        training = spec.mode == "train"
        recipe, optimizer = RECIPES[spec.precision], spec.optimizer
        if not training:
            recipe, optimizer = replace(recipe, master=False), "sgd"  # weights and nothing else
        tier = spec.offload_optimizer if training else spec.offload_parameters
        if tier == "none":
            return
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        within = {parameter for block in blocks for parameter in block.parameters()}
        rest = [parameter for parameter in names if parameter not in within]
        groups = [(f"block {index}", list(block.parameters())) for index, block in enumerate(blocks)]
        units = make_units([*groups, ("rest", rest)] if training else groups, recipe, optimizer)
        moves = spec.offload_parameters != "none"
        apart = moves and spec.offload_parameters != tier  # weights on the host, states in a file
        if tier == "cpu":
            self.states = HostStates(units, self.arena, self.link)
        else:
            directory = nvme_directory()
            self.warnings += prepare_directory(directory)
            fetched = units[: len(blocks)] if moves and not apart else []
            self.states = NvmeStates(units, self.arena, self.link, directory, recipe=recipe, fetched=fetched)
        home = HostWeights(units[: len(blocks)], self.arena, self.link) if apart else None
        moving = frozenset(units[: len(blocks)]) if moves else frozenset()
        if training:
            if spec.max_grad_norm is not None and spec.offload_overlap:
                self.warnings.append(clipping_note(sum(parameter.nbytes for parameter in names)))
            self.optimizer = OffloadedOptimizer(
                units, self.states, self.link, self.arena,
                recipe=recipe, optimizer=optimizer, accumulation=spec.grad_accumulation,
                deliver=self._delivery(moving, home), max_norm=spec.max_grad_norm, order=names,
            )  # fmt: skip
        if moves:
            self.parameters = ParameterOffload(blocks, units[: len(blocks)], home or self.states, self.link)
        for unit in units:
            if unit in moving and self.parameters is not None and initialise is not None:
                self.parameters.allocate(unit)
                for parameter in unit.parameters:
                    initialise(names[parameter], parameter)
            self.states.create(unit)
            if unit in moving and self.parameters is not None:
                if home is not None:
                    home.keep(unit, unit.parameters)
                self.parameters.drop(unit)

    def _delivery(self, moving: frozenset[Unit], home: HostWeights | None) -> Callable[[Unit, list[Slot]], list[Copy]]:
        """Where new weights go: to the device, to their home on the host, or nowhere (the states are their home)."""

        def deliver(unit: Unit, slots: list[Slot]) -> list[Copy]:
            if unit not in moving:
                pairs = zip(slots, unit.parameters, strict=True)
                return [self.link.update(slot.parameter, parameter) for slot, parameter in pairs]
            if home is not None:
                home.keep(unit, [slot.parameter for slot in slots])
            return []

        return deliver

    def send_activations(self, last: nn.Module, parameters: Iterator[Tensor]) -> None:
        """Send what autograd saves before `last` runs to the host."""
        self.activations = ActivationOffload(last, parameters, self.link, self.arena)

    def forward(self) -> AbstractContextManager[None]:
        """The context in which forward has to run."""
        return self.activations if self.activations is not None else nullcontext()

    def observe(self, observer: Observer) -> None:
        """Have `observer` told of what this frees and fills."""
        for part in (self.optimizer, self.parameters):
            if part is not None:
                part.observer = observer

    def moved_bytes(self) -> dict[str, int]:
        """What has moved so far: `down`, `up`, `read`, `written`. Waits for what is being written."""
        if self.states is not None:
            self.states.settle()
        return dict(self.ledger.moved)

    def close(self) -> None:
        """Stop the threads and remove the files."""
        for part in (self.optimizer, self.states, self.link):
            if part is not None:
                part.close()
