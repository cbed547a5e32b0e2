"""A forward pass as a list of ops over named tensors: the one table from which saved bytes, live bytes, FLOPs and
memory traffic are all read. Nothing is executed.

An op reads tensors, makes tensors, and saves some of either for backward. Views make nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from engine.recipes import DTYPE_BYTES

OUTSIDE = "outside-blocks"
"""The op group of what belongs to no block: tokens, embedding, final norm, head, loss."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A storage of one op's making. `formula` is its size in the notation of docs/formulas.md."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: str
    formula: str = ""
    differentiable: bool = True
    parameter: bool = False
    """Counted elsewhere: a parameter, buffer or earlier tape's tensor."""

    elements: int = field(init=False)
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "elements", prod(self.shape))
        object.__setattr__(self, "bytes", self.elements * DTYPE_BYTES[self.dtype])


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel (or a fused few) and what autograd does for it."""

    name: str
    group: str
    reads: tuple[str, ...]
    makes: tuple[Tensor, ...]
    saves: tuple[str, ...] = ()
    weights: tuple[tuple[str, int], ...] = ()
    """(name, bytes) of each parameter gradient its backward produces."""
    passes: bool = False
    """Backward hands the same gradient storage on (residual addition, in-place or view-like ops)."""
    scratch: int = 0
    """Bytes alive only inside the forward kernel."""
    backward_scratch: int = 0
    """Bytes alive only inside the backward kernel, beside the gradients it returns."""
    flops: int = 0
    backward_flops: int = 0
    product: bool = False
    """A matrix product (its time is FLOPs); otherwise its time is memory traffic."""
    causal: bool = False
    """The kernel skips the half of its FLOPs that the causal mask would throw away."""
    weight_bytes: int = 0
    """Parameter bytes that the kernel reads."""


@dataclass
class Tape:
    """Ops in order. `inputs` are made elsewhere; `holds` maps a tensor to the op until whose end Python keeps it."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    holds: dict[str, int] = field(default_factory=dict)
    """Tensor -> index of the last op during which a Python variable still refers to it."""

    _kept: dict[frozenset[str], dict[str, Tensor]] = field(default_factory=dict)

    def input(self, tensor: Tensor) -> Tensor:
        self.inputs[tensor.name] = self.tensors[tensor.name] = tensor
        return tensor

    def add(self, op: Op) -> Tensor:
        """Append an op; its first product."""
        self.ops.append(op)
        for tensor in op.makes:
            assert tensor.name not in self.tensors, tensor.name
            self.tensors[tensor.name] = tensor
        return op.makes[0]

    def hold(self, *tensors: Tensor) -> None:
        """The newest op still runs with these referred to."""
        for tensor in tensors:
            self.holds[tensor.name] = len(self.ops) - 1

    @cached_property
    def saved(self) -> dict[str, Tensor]:
        """What backward needs, by name, in the order saved; inputs included, parameters not."""
        names = dict.fromkeys(name for op in self.ops for name in op.saves)
        return {name: self.tensors[name] for name in names if not self.tensors[name].parameter}

    @cached_property
    def makers(self) -> dict[str, Op]:
        """The op that made each tensor; inputs have none."""
        return {tensor.name: op for op in self.ops for tensor in op.makes}

    def kept(self, recomputed: frozenset[str]) -> dict[str, Tensor]:
        """What a block keeps whose ops of the `recomputed` groups run again: the tensors that some op saves, or that
        a dropped one is made from, and that no recomputed op makes."""
        if recomputed in self._kept:
            return self._kept[recomputed]
        kept: dict[str, Tensor] = {}
        wanted, seen = list(self.saved), set(self.saved)
        while wanted:
            name = wanted.pop()
            maker = self.makers.get(name)
            if maker is None or maker.group not in recomputed:
                kept[name] = self.tensors[name]
            elif self.tensors[name].dtype != "bool":  # a dropout mask depends on the generator alone
                wanted += [read for read in maker.reads if read not in seen]
                seen.update(maker.reads)
        self._kept[recomputed] = kept
        return kept

    def again(self, recomputed: frozenset[str]) -> list[Op]:
        """The ops that run once more in backward when the `recomputed` groups do."""
        kept = self.kept(recomputed)
        wanted, again = [name for name in self.saved if name not in kept], dict[str, Op]()
        while wanted:
            maker = self.makers[wanted.pop()]
            if maker.name not in again:
                again[maker.name] = maker
                wanted += [read for read in maker.reads if read not in kept and read in self.makers]
        return list(again.values())

    def traffic(self, op: Op) -> int:
        """Bytes that a kernel reads and writes once."""
        return op.weight_bytes + sum(self.tensors[name].bytes for name in op.reads) + total_bytes(op.makes)

    @cached_property
    def last_saving_op(self) -> int:
        """Index of the last op that an early-stopping recomputation runs: inputs are saved before their op runs, so
        one that saves nothing it makes is not run again."""
        last = max((index for index, op in enumerate(self.ops) if op.saves), default=-1)
        made = {tensor.name for tensor in self.ops[last].makes}
        return last if made.intersection(self.ops[last].saves) else last - 1

    @cached_property
    def last_read(self) -> dict[str, int]:
        """Index of the last op that reads or holds each tensor (its maker, if none)."""
        last: dict[str, int] = {}
        for index, op in enumerate(self.ops):
            last |= dict.fromkeys(op.reads, index) | {tensor.name: index for tensor in op.makes}
        return last | {name: max(index, last.get(name, 0)) for name, index in self.holds.items()}


def total_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.bytes for tensor in tensors)
