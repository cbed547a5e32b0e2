"""The blocks of a run as tapes: by formula for our own decoder, by tracing one fake forward pass for any other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from engine import fake_ops
from engine.checkpointing.budget import Profile
from engine.checkpointing.groups import Labeller, aten, labelling, watch
from engine.checkpointing.replay import MASK, reads_shape_only, tensors_in, writes_to
from engine.closed_form import predict
from engine.closed_form.block import block_tape
from engine.closed_form.ops import context_of
from engine.closed_form.tape import Op, Tape, total_bytes
from engine.closed_form.tape import Tensor as Row
from engine.models.huggingface import HuggingFaceModel
from engine.spec import RunSpec

if TYPE_CHECKING:
    from engine.training import Training

CPU = torch.device("cpu")


def profile(spec: RunSpec) -> Profile:
    """What the blocks of a spec keep and cost, and what is kept outside them."""
    neutral = {"offload_optimizer": "none", "offload_parameters": "none", "offload_activations": "none"}
    bare = spec.model_copy(update={**neutral, "checkpointing": "none", "sharding": "none", "world_size": 1})
    if spec.runs_transformers:
        tapes, saved, shared = _traced(bare)
    else:
        tapes, shared = (block_tape(context_of(bare)),) * spec.architecture.layers, 0
        saved = predict(bare).memory.saved_activation_bytes or 0
    return Profile(tapes, saved - sum(total_bytes(tape.saved.values()) for tape in tapes), shared)


def _traced(spec: RunSpec) -> tuple[tuple[Tape, ...], int, int]:
    """Tapes of every block, equal ones shared; the bytes that a whole forward pass saves; the bytes besides that blocks
    read and that come from outside them (masks).

    On fake tensors; where an operator has no fake form or its sizes depend on values (experts), one real step.
    """
    from engine.observe import MemoryPass  # here, since a run is built with a policy, and this policy asks for a run
    from engine.simulate import simulate
    from engine.training import build

    with torch.random.fork_rng():
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                saved = simulate(spec)[0].memory.saved_activation_bytes or 0
                with fake_ops.Corrected():
                    tapes, read = _trace_blocks(build(spec, CPU, initialised=False))
        except (RuntimeError, DynamicOutputShapeException, DataDependentOutputException):
            saved = MemoryPass(build(spec, CPU)).run(0)[0].saved_bytes()
            tapes, read = _trace_blocks(build(spec, CPU))
    shared: list[Tape] = []
    for tape in tapes:
        shared.append(next((other for other in shared if other == tape), tape))
    return tuple(shared), saved, read


def _trace_blocks(training: Training) -> tuple[list[Tape], int]:
    """The tapes, and the bytes that blocks read and nobody keeps otherwise."""
    assert isinstance(training.model, HuggingFaceModel)
    recorders: list[_TracedBlock] = []
    for stack in training.model.block_lists:
        for index, block in enumerate(stack):
            recorders.append(_TracedBlock(block))
            stack[index] = recorders[-1]
    training.step(0)
    state = {t.untyped_storage()._cdata for t in (*training.model.parameters(), *training.model.buffers())}
    foreign = {storage: size for recorder in recorders for storage, size in recorder.foreign.items()}
    read = sum(size for storage, size in foreign.items() if storage not in state)
    return [recorder.tape for recorder in recorders if recorder.tape is not None], read


class _TracedBlock(nn.Module):
    """A block whose run becomes a tape."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.inside = block
        self.tape: Tape | None = None
        self.foreign: dict[int, int] = {}
        watch(block)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inside"), name)

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Any:
        with labelling() as labeller:
            tracer = Tracer(x, labeller)
            tracer.note_foreign(tensors_in((arguments, options)))  # a block that runs again holds all of them
            with saved_tensors_hooks(tracer.pack, lambda saved: saved), tracer:
                output = self.inside(x, *arguments, **options)
        self.tape, self.foreign = tracer.finish(), tracer.foreign
        return output


class Tracer(TorchDispatchMode):
    """Turns the operators of one block's run into a tape. Storages are named by the order of their making."""

    def __init__(self, x: Tensor, labeller: Labeller) -> None:
        TorchDispatchMode.__init__(self)
        self.labeller = labeller
        self.tape = Tape()
        self.names: dict[int, str] = {}
        self.alive: list[Any] = []
        """Every storage of the run: none may be freed, or its name would pass on to the next at its address."""
        self.shape_only: set[str] = set()
        self.rows: list[dict[str, Any]] = []
        self.saves: list[tuple[int, str]] = []
        """(index of the newest op, name)."""
        self.foreign: dict[int, int] = {}
        """Storages from outside the block that it reads and autograd does not keep, with their bytes."""
        self.packed: set[int] = set()
        self._name(x, self.tape.input(_row("x", x, "")))

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if name := self.names.get(storage):
            self.saves.append((max(0, len(self.rows) - 1), name))
        else:
            self.packed.add(storage)
        return tensor

    def _name(self, tensor: Tensor, row: Row) -> None:
        storage = tensor.untyped_storage()
        self.alive.append(storage)
        self.names[storage._cdata] = row.name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        inputs = tensors_in((args, options))
        storages = [tensor.untyped_storage()._cdata for tensor in inputs]
        group = self.labeller.group(func, inputs)
        output = func(*args, **options)
        places = writes_to(func)
        written = [args[place] for place in places] if places is not None else inputs
        outputs = [*output] if isinstance(output, tuple | list) else [output]
        made = [t for t in outputs if isinstance(t, Tensor) and t.untyped_storage()._cdata not in storages]
        for tensor in made:
            self.labeller.made(func, tensor.untyped_storage()._cdata, in_place=False)
        for tensor in written:
            self.labeller.made(func, tensor.untyped_storage()._cdata, in_place=True)
        if made or written:
            formula = flop_registry.get(func._overloadpacket)
            flops = formula(*args, **options, out_val=output) if formula else 0
            self._note(func, group, inputs, [*made, *written], flops)
        return output

    def _note(self, func: Any, group: str, inputs: Iterable[Tensor], made: list[Tensor], flops: int) -> None:
        known = [self.names[t.untyped_storage()._cdata] for t in inputs if t.untyped_storage()._cdata in self.names]
        reads = () if reads_shape_only(func) else tuple(n for n in dict.fromkeys(known) if n not in self.shape_only)
        outside = [t for t in inputs if t.untyped_storage()._cdata not in self.names]
        if not reads_shape_only(func):
            self.note_foreign(outside)
        rows = []
        for index, tensor in enumerate(made):
            row = _row(
                f"t{len(self.tape.tensors)}", tensor, group, mask=func is aten.native_dropout.default and index == MASK
            )
            self.tape.tensors[row.name] = row
            self._name(tensor, row)
            rows.append(row)
            if reads_shape_only(func):
                self.shape_only.add(row.name)
        self.rows.append(
            {"name": f"{len(self.rows)} {func}", "group": group, "reads": reads, "makes": tuple(rows), "flops": flops,
             "product": flops > 0, "weight_bytes": sum(t.nbytes for t in outside)}
        )  # fmt: skip

    def note_foreign(self, tensors: Iterable[Tensor]) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors]
        self.foreign |= {storage._cdata: storage.nbytes() for storage in storages if storage._cdata not in self.names}

    def finish(self) -> Tape:
        for index, row in enumerate(self.rows):
            saves = tuple(dict.fromkeys(name for at, name in self.saves if at == index))
            self.tape.ops.append(Op(**row, saves=saves))
        self.alive.clear()
        for storage in self.packed:
            self.foreign.pop(storage, None)
        return self.tape


def _row(name: str, tensor: Tensor, group: str, *, mask: bool = False) -> Row:
    """A storage by its bytes. `bool` marks what depends on the random generator alone."""
    return Row(name, (tensor.untyped_storage().nbytes(),), "bool" if mask else "int8", group)
