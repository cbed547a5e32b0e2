"""RunSpec -> a training step. The only place where model, checkpoint policy, kernel, optimizer and offload meet.

It runs unchanged on real tensors (measurement) and on fake ones (simulation).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.architecture import Architecture
from engine.attention import Kernel, select_kernel
from engine.checkpoint_names import Checkpointing, parse_checkpointing
from engine.checkpointing.policies import apply_checkpointing
from engine.checkpointing.segments import Passed
from engine.errors import UnsupportedError
from engine.losses import cross_entropy
from engine.models.decoder import Decoder, initialise, initialise_parameter, rotary_tables
from engine.models.huggingface import HuggingFaceModel, build_huggingface
from engine.offload.assembly import Offload, hollow, offloads
from engine.optimizers import DTYPES, DeviceOptimizer
from engine.recipes import RECIPES
from engine.spec import RunSpec


class Updates(Protocol):
    """What a training step needs of an optimizer."""

    buffers: Sequence[Tensor]
    """Device tensors that it keeps between steps beside the states."""

    def step(self) -> object:
        """Update every parameter that has a gradient, and drop the gradients."""

    def tensors(self) -> list[Tensor]:
        """The states that the device holds."""


PhaseMarker = Callable[[str], AbstractContextManager[object]]
"""Called with a phase's name around each phase of a step; measuring passes hang their clocks here."""


def unmarked(_phase: str) -> AbstractContextManager[None]:
    """The phase marker of a step that nobody watches."""
    return nullcontext()


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises UnsupportedError if a CUDA device is asked for and not there."""
    available = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if available else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not available:
        raise UnsupportedError(
            "device", f"{name} was asked for, but torch {torch.__version__} sees no CUDA device here"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UnsupportedError(
            "device", f"{name} was asked for; this machine has {torch.cuda.device_count()} CUDA devices"
        )
    return device


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in local}
    return sum(storage.nbytes() for storage in storages.values())


@dataclass
class Training:
    """A built training run. `blocks` are the model's blocks before the checkpoint policy wrapped them."""

    spec: RunSpec
    device: torch.device
    model: Decoder | HuggingFaceModel
    blocks: list[nn.Module]
    kernel: Kernel
    optimizer: Updates
    offload: Offload | None = None
    rank: int | None = None
    """This process's number among the spec's `world_size`; None when there is no process group."""
    notes: list[str] = field(default_factory=list)

    def step(self, index: int, marker: PhaseMarker = unmarked) -> Tensor:
        """One optimizer step on the batch of that index; the mean loss, detached."""
        total = torch.zeros((), device=self.device)
        count = self.spec.grad_accumulation
        share = torch.full((), 1 / count, device=self.device)  # dividing the loss would keep a scalar for backward
        for micro in range(count):
            with marker("forward"):
                loss = self._forward(index * count + micro)
            with marker("backward"):
                loss.backward(share)
            total += loss.detach() * share
            del loss
        with marker("optimizer"):
            self.optimizer.step()
            if self.offload and self.offload.parameters:
                self.offload.parameters.end_step()
        return total

    def _forward(self, number: int) -> Tensor:
        tokens, targets = self._batch(number)
        recipe = RECIPES[self.spec.precision]
        lower = self.offload.forward() if self.offload else nullcontext()
        with lower, torch.autocast(self.device.type, torch.bfloat16, enabled=recipe.autocast):
            return self._loss(tokens, targets)

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Ours on hidden states, or the standard one; transformers' classes bring their own standard loss."""
        fused = self.spec.fused_loss
        if isinstance(self.model, HuggingFaceModel) and not fused:
            loss: Tensor = self.model(tokens, targets)
            return loss
        hidden = self.model(tokens)
        return cross_entropy(hidden, self.model.head_weight, targets, chunks=self.spec.loss_chunks, fused=fused)

    def _batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Random tokens and targets, each (B, S) int64, from the seed and the batch's number alone."""
        stream = 2 * (self.spec.seed * 1_000_003 + number)
        return self._draw(stream), self._draw(stream + 1)

    def _draw(self, stream: int) -> Tensor:
        """This rank's rows. Those of the ranks before it are drawn and dropped: together the ranks see one batch."""
        generator = torch.Generator(self.device).manual_seed(stream)
        shape = (self.spec.micro_batch, self.spec.seq)
        vocab = self.spec.architecture.vocab
        draw = partial(torch.randint, vocab, shape, generator=generator, device=self.device)
        for _ in range(self.rank or 0):
            draw()
        return draw()

    def base_bytes(self) -> dict[str, int]:
        """Device bytes alive between steps, by category."""
        return {
            "parameters": storage_bytes([*self.model.parameters(), *self.model.buffers()]),
            "optimizer_states": storage_bytes(self.optimizer.tensors()),
            "temporaries": storage_bytes(self.optimizer.buffers),
        }

    def compile(self) -> None:
        """Trace the model with torch.compile from its next step on. Block marks are not kept in a compiled graph."""
        inside = self.model.inside if isinstance(self.model, HuggingFaceModel) else self.model
        inside.forward = torch.compile(inside.forward)

    def close(self) -> None:
        """Stop what runs beside the training thread and remove its files."""
        if self.offload:
            self.offload.close()


def build(
    spec: RunSpec,
    device: torch.device,
    *,
    arch: Architecture | None = None,
    plan: Checkpointing | None = None,
    initialised: bool = True,
) -> Training:
    """Model, policy, kernel and optimizer of a training spec, initialised from its seed.

    `arch` and `plan` stand in for the spec's own (the simulator builds the same model with fewer blocks);
    `initialised=False` leaves a transformers model's values as they come (fake tensors have none).
    """
    recipe = RECIPES[spec.precision]
    arch = arch or spec.architecture
    kernel = select_kernel(
        spec.attention,
        device=device,
        dtype=DTYPES[recipe.compute],
        head_dim=arch.head_dim,
        dropout=spec.dropout,
    )
    torch.manual_seed(spec.seed)
    model = build_model(spec, arch, device, kernel, initialised)
    lists = model.block_lists if isinstance(model, HuggingFaceModel) else [model.blocks]
    blocks = [block for blocks in lists for block in blocks]
    ranked = spec.world_size > 1 and dist.is_available() and dist.is_initialized()  # a rank also plans alone
    offload = None
    optimizer: Updates
    if ranked:
        optimizer = _shard(spec, model, blocks)
    else:
        offload = _build_offload(spec, arch, device, model, blocks) if offloads(spec) else None
        optimizer = (offload and offload.optimizer) or DeviceOptimizer(
            model.parameters(), recipe, spec.optimizer, spec.max_grad_norm
        )
    policy = plan or parse_checkpointing(spec.checkpointing)
    plans = [apply_checkpointing(stack, policy, dropout=spec.dropout > 0, spec=spec) for stack in lists]
    notes = [*(model.notes if isinstance(model, HuggingFaceModel) else [kernel.note]), *plans]
    if offload:
        notes = [*notes, *offload.warnings]
        if spec.offload_activations != "none":
            offload.send_activations(_last_to_run(lists), model.parameters())
    rank = dist.get_rank() if ranked else None
    notes = [note for note in notes if note]
    return Training(spec, device, model.train(), blocks, kernel, optimizer, offload, rank, notes)


def _shard(spec: RunSpec, model: nn.Module, blocks: list[nn.Module]) -> Updates:
    """This rank's share, where a process group is there."""
    from engine.sharding.zero import shard  # costs half a second, which only ranks need

    return shard(
        model, blocks, spec.sharding, RECIPES[spec.precision], spec.optimizer,
        offload=spec.offload_parameters == "cpu", max_norm=spec.max_grad_norm,
    )  # fmt: skip


def _last_to_run(lists: list[nn.ModuleList]) -> nn.Module:
    """The last entry of the last stack that runs blocks: a checkpoint segment stands where its first block was."""
    return [entry for entry in lists[-1] if not isinstance(entry, Passed)][-1]


def _build_offload(
    spec: RunSpec, arch: Architecture, device: torch.device, model: Decoder | HuggingFaceModel, blocks: list[nn.Module]
) -> Offload:
    """The tiers below the device. Hollow blocks of our decoder are filled one at a time."""
    fill = None
    if isinstance(model, Decoder) and spec.offload_parameters != "none":
        fill = partial(initialise_parameter, layers=arch.layers, seed=spec.seed)
    return Offload(spec, device, model, blocks, fill)


def build_model(
    spec: RunSpec, arch: Architecture, device: torch.device, kernel: Kernel, initialised: bool
) -> Decoder | HuggingFaceModel:
    """Our decoder for presets and made-up shapes of its two styles; transformers' class for the other families and
    for a config that the user hands in."""
    if spec.runs_transformers:
        return build_huggingface(
            arch,
            attention=spec.attention,
            kernel=kernel,
            dropout=spec.dropout,
            dtype=DTYPES[RECIPES[spec.precision].weight],
            device=device,
            initialise=initialised,
        )
    return build_decoder(spec, device, kernel, arch)


def build_decoder(spec: RunSpec, device: torch.device, kernel: Kernel, arch: Architecture | None = None) -> Decoder:
    """The decoder of a spec, in the recipe's weight dtype, initialised."""
    arch = arch or spec.architecture
    if arch.style == "other":
        raise UnsupportedError(
            "model", f"{arch.name} ({arch.model_type}) needs the transformers class, which is not here"
        )
    apart = spec.offload_parameters != "none"
    dtype, positions = DTYPES[RECIPES[spec.precision].weight], spec.seq + spec.new_tokens
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta") if apart else device:
            model = Decoder(arch, kernel, dropout=spec.dropout, positions=positions)
    finally:
        torch.set_default_dtype(default)
    if apart:
        hollow(model, device, model.blocks)
        if model.uses_rotary:
            model.rotary_cos, model.rotary_sin = (table.to(device) for table in rotary_tables(arch, positions, dtype))
    initialise(model, spec.seed)
    return model
