"""RunSpec -> a training step. The only place where model, checkpoint policy, kernel, optimizer and offload meet.

It runs unchanged on real tensors (measurement) and on fake ones (simulation).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from engine.attention import Kernel, select_kernel
from engine.checkpoint_names import parse_checkpointing
from engine.checkpointing import apply_checkpointing
from engine.errors import UnsupportedError
from engine.losses import cross_entropy
from engine.models.decoder import Decoder, initialise
from engine.optimizers import DTYPES, DeviceOptimizer
from engine.recipes import RECIPES
from engine.spec import RunSpec

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
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


@dataclass
class Training:
    """A built training run. `blocks` are the model's blocks before the checkpoint policy wrapped them."""

    spec: RunSpec
    device: torch.device
    model: Decoder
    blocks: list[nn.Module]
    kernel: Kernel
    optimizer: DeviceOptimizer
    notes: list[str] = field(default_factory=list)

    def step(self, index: int, marker: PhaseMarker = unmarked) -> Tensor:
        """One optimizer step on the batch of that index; the mean loss, detached."""
        total = torch.zeros((), device=self.device)
        for micro in range(self.spec.grad_accumulation):
            with marker("forward"):
                loss = self._forward(index * self.spec.grad_accumulation + micro)
            with marker("backward"):
                loss.backward()
            total += loss.detach()
            del loss
        with marker("optimizer"):
            self.optimizer.step()
        return total

    def _forward(self, number: int) -> Tensor:
        tokens, targets = self._batch(number)
        recipe = RECIPES[self.spec.precision]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=recipe.autocast):
            hidden = self.model(tokens)
            loss = cross_entropy(hidden, self.model.head_weight, targets, chunks=self.spec.loss_chunks)
        mean: Tensor = loss / self.spec.grad_accumulation if self.spec.grad_accumulation > 1 else loss
        return mean

    def _batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Random tokens and targets, each (B, S) int64, from the seed and the batch's number alone."""
        generator = torch.Generator(self.device).manual_seed(self.spec.seed * 1_000_003 + number)
        shape = (self.spec.micro_batch, self.spec.seq)
        vocab = self.spec.architecture.vocab
        tokens = torch.randint(vocab, shape, generator=generator, device=self.device)
        return tokens, torch.randint(vocab, shape, generator=generator, device=self.device)

    def base_bytes(self) -> dict[str, int]:
        """Device bytes alive between steps, by category."""
        return {
            "parameters": storage_bytes([*self.model.parameters(), *self.model.buffers()]),
            "optimizer_states": storage_bytes(self.optimizer.tensors()),
        }


def build(spec: RunSpec, device: torch.device) -> Training:
    """Model, policy, kernel and optimizer of a training spec, initialised from its seed."""
    recipe = RECIPES[spec.precision]
    arch = spec.architecture
    kernel = select_kernel(
        spec.attention,
        device=device,
        dtype=DTYPES[recipe.compute],
        head_dim=arch.head_dim,
        dropout=spec.dropout,
    )
    torch.manual_seed(spec.seed)
    model = build_decoder(spec, device, kernel)
    blocks = list(model.blocks)
    optimizer = DeviceOptimizer(model.parameters(), recipe, spec.optimizer)
    apply_checkpointing(model.blocks, parse_checkpointing(spec.checkpointing), dropout=spec.dropout > 0)
    notes = [kernel.note] if kernel.note else []
    return Training(spec, device, model.train(), blocks, kernel, optimizer, notes)


def build_decoder(spec: RunSpec, device: torch.device, kernel: Kernel) -> Decoder:
    """The decoder of a spec, in the recipe's weight dtype, initialised."""
    arch = spec.architecture
    if arch.style == "other":
        raise UnsupportedError(
            "model", f"{arch.name} ({arch.model_type}) needs the transformers class, which is not here"
        )
    default = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[RECIPES[spec.precision].weight])
    try:
        with device:
            model = Decoder(arch, kernel, dropout=spec.dropout, positions=spec.seq + spec.new_tokens)
    finally:
        torch.set_default_dtype(default)
    initialise(model, spec.seed)
    return model
