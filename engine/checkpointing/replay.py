"""Selective recomputation, operator by operator: what the ops of some groups make is not kept, but made again.

While a block runs forward, a dispatch mode notes each op of the recomputed groups: the function, and its inputs as
*views of storages*. Where autograd would save a tensor that such an op made, it saves a `View` of a `Value` instead;
when backward asks, the value's ops run again from the nearest kept storages.

    kept = the storages that some op saves, or that a dropped one is made from, and that no recomputed op makes

So exactly those ops run again whose results backward needs, once each, without autograd and without modules. Compare
`torch.utils.checkpoint.create_selective_checkpoint_contexts`, which caches what listed ops return, needed or not, and
runs the whole block's Python again.

A value is dropped as soon as the last saved tensor and the last pending op that refer to it are gone. Ops that read
only a tensor's shape (`empty_like`, a dropout mask) keep nothing of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.checkpointing.groups import Labeller, aten
from engine.checkpointing.rng import capture, replay
from engine.errors import RunError

Pack = Callable[[Tensor], Any]
Hooks = tuple[Pack, Callable[[Any], Tensor]]

MASK = 1
"""Which output of native_dropout is the mask: it depends on the input's shape alone."""


class Value:
    """A storage as some op left it; `tensor` once it has been made again."""

    __slots__ = ("__weakref__", "dtype", "index", "step", "tensor")

    def __init__(self, step: Step, index: int, dtype: torch.dtype) -> None:
        self.step: Step | None = step
        self.index, self.dtype = index, dtype
        self.tensor: Tensor | None = None

    def get(self) -> Tensor:
        if self.tensor is None:
            assert self.step is not None
            self.settle(self.step.run()[self.index])
        assert self.tensor is not None
        return self.tensor

    def settle(self, tensor: Tensor) -> None:
        """It is made: what it was made from is not needed any more."""
        self.tensor, self.step = tensor, None

    def fresh(self) -> Tensor:
        """A copy of its own, for an op that writes to it. Whoever else wants this value has it made once more."""
        if self.tensor is not None:
            return self.tensor.clone()
        step = self.step
        assert step is not None
        made = step.run()[self.index]
        self.tensor, self.step = None, step  # not what `run` made, which is about to be written to
        return made


class View:
    """A tensor by its value and geometry; what autograd holds in place of it."""

    __slots__ = ("device", "geometry", "value")

    def __init__(self, value: Value, tensor: Tensor) -> None:
        self.value, self.device = value, tensor.device.type
        self.geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())

    def restore(self, base: Tensor | None = None) -> Tensor:
        return (self.value.get() if base is None else base).as_strided(*self.geometry)


class Shape:
    """A tensor of which only shape, strides, dtype and device are read."""

    __slots__ = ("device", "dtype", "size", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.size, self.stride, self.dtype, self.device = tensor.size(), tensor.stride(), tensor.dtype, tensor.device

    def restore(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


class Held:
    """A kept tensor that an op reads. Outer saved-tensor hooks (offloading) get it once something needs it."""

    __slots__ = ("packed", "unpack", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.packed: Any = tensor
        self.version = tensor._version
        self.unpack: Callable[[Any], Tensor] | None = None

    def seal(self, outer: Hooks) -> None:
        if self.unpack is None:
            self.packed, self.unpack = outer[0](self.packed), outer[1]

    def restore(self) -> Tensor:
        if self.unpack is not None:
            return self.unpack(self.packed)
        tensor: Tensor = self.packed
        if tensor._version != self.version:
            raise RunError(
                "checkpointing: a tensor that selective recomputation reads again was written to in place after it "
                "was read; use per-layer"
            )
        return tensor


class Step:
    """One op to run again. `written` is the value behind its first argument if it writes to that in place."""

    __slots__ = ("arguments", "func", "made", "options", "random", "written")

    def __init__(self, func: Any, arguments: Any, options: Any, random: tuple[torch.device, bytearray] | None) -> None:
        self.func, self.arguments, self.options, self.random = func, arguments, options, random
        self.written: View | None = None
        self.made: list[weakref.ref[Value] | None] = []

    def run(self) -> list[Tensor]:
        """Its outputs (for an op in place: the whole storage it wrote to). Values that wait for one are settled."""
        base = self.written.value.fresh() if self.written else None
        arguments = _map(_restore, self.arguments)
        if self.written and base is not None:
            arguments = (self.written.restore(base), *arguments[1:])
        output = self._call(arguments, _map(_restore, self.options))
        outputs = [base] if base is not None else [*output] if isinstance(output, tuple | list) else [output]
        for reference, tensor in zip(self.made, outputs, strict=False):
            value = reference() if reference else None
            if value is not None and value.tensor is None:
                value.settle(tensor)
        return outputs

    def _call(self, arguments: Any, options: Any) -> Any:
        if self.random is None:
            return self.func(*arguments, **options)
        with replay(*self.random):
            return self.func(*arguments, **options)

    def seal(self, outer: Hooks) -> None:
        """Hand every kept tensor that this step, or one before it, reads to outer hooks."""

        def hand(leaf: Any) -> Any:
            if isinstance(leaf, Held):
                leaf.seal(outer)
            elif isinstance(leaf, View) and leaf.value.step is not None:
                leaf.value.step.seal(outer)
            return leaf

        _map(hand, (self.arguments, self.options, self.written))


def _restore(leaf: Any) -> Any:
    return leaf.restore() if isinstance(leaf, View | Held | Shape) else leaf


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, tuple | list):
        return type(tree)(_map(function, leaf) for leaf in tree) if type(tree) in (tuple, list) else function(tree)
    if isinstance(tree, dict):
        return {key: _map(function, leaf) for key, leaf in tree.items()}
    return function(tree)


def tensors_in(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for leaf in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, tuple | list | dict):
            found += tensors_in(leaf)
    return found


@cache
def reads_shape_only(func: Any) -> bool:
    """Ops whose result does not depend on their tensor argument's values."""
    name: str = func._schema.name.removeprefix("aten::")
    return name.startswith(("new_", "empty")) or name.endswith("_like")


@cache
def only_views(func: Any) -> bool:
    """Ops that make no storage and write to none: whatever they return is found by its storage."""
    returns = func._schema.returns
    return bool(returns) and all(made.alias_info is not None and not made.alias_info.is_write for made in returns)


@cache
def writes_to(func: Any) -> list[int] | None:
    """Positions of the arguments an op writes to; None if it writes to a list of tensors or a keyword."""
    places = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if argument.kwarg_only or "[]" in str(argument.type):
                return None
            places.append(place)
    return places


class Recording(TorchDispatchMode):
    """Notes the ops of `groups` while a block runs; its `pack` and `unpack` are the block's saved-tensor hooks."""

    def __init__(self, groups: frozenset[str], labeller: Labeller, random: bool) -> None:
        TorchDispatchMode.__init__(self)
        self.groups, self.labeller, self.random = groups, labeller, random
        self.matched: set[str] = set()
        self.values: dict[int, tuple[Value, weakref.ref[Any]]] = {}
        self.outer: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def close(self) -> None:
        """The block has run: only what was saved, and what that is made from, lives on."""
        self.values.clear()

    def pack(self, tensor: Tensor) -> Any:
        if value := self._value(tensor):
            if self.outer and value.step:
                value.step.seal(self.outer)
            return View(value, tensor)
        return (self.outer[0](tensor), self.outer[1]) if self.outer else tensor

    def _value(self, tensor: Tensor) -> Value | None:
        """The value that a tensor is a view of, if it will be made again."""
        found = self.values.get(tensor.untyped_storage()._cdata)
        return found[0] if found and found[0].dtype == tensor.dtype else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if only_views(func):
            return func(*args, **options)
        inputs = tensors_in((args, options))
        group = self.labeller.group(func, inputs)
        self.matched.add(group)
        again = group in self.groups or (bool(inputs) and reads_shape_only(func))
        step = self._step(func, args, options) if again else None
        output = func(*args, **options)
        places = writes_to(func)
        if places is None or places:
            self._wrote(func, args, places, step)
        else:
            self._made(func, args, output, inputs, step)
        return output

    def _step(self, func: Any, args: Any, options: Any) -> Step:
        leaf = Shape if reads_shape_only(func) else self._leaf

        def convert(x: Any) -> Any:
            return leaf(x) if isinstance(x, Tensor) else x

        return Step(func, _map(convert, args), _map(convert, options), self._random(func, args))

    def _leaf(self, tensor: Tensor) -> View | Held:
        value = self._value(tensor)
        return View(value, tensor) if value else Held(tensor)

    def _random(self, func: Any, args: Any) -> tuple[torch.device, bytearray] | None:
        """The generator state, if the op may draw from it: aten says so of its own, others may do so unsaid."""
        draws = torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten"
        tensors = tensors_in(args)
        if not (self.random and draws and tensors) or isinstance(tensors[0], FakeTensor):
            return None
        return tensors[0].device, capture(tensors[0].device)

    def _made(self, func: Any, args: Any, output: Any, inputs: list[Tensor], step: Step | None) -> None:
        outputs = output if isinstance(output, tuple | list) else [output]
        read = {tensor.untyped_storage()._cdata for tensor in inputs}
        for index, tensor in enumerate(outputs):
            if not isinstance(tensor, Tensor):
                if step:
                    step.made.append(None)
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in read:
                if step:
                    step.made.append(None)
                continue
            self.labeller.made(func, storage._cdata, in_place=False)
            self.values.pop(storage._cdata, None)
            if step is None:
                continue
            value = Value(step, index, tensor.dtype)
            step.made.append(weakref.ref(value))
            if func is aten.native_dropout.default and index == MASK:
                value.step = Step(func, (Shape(args[0]), *args[1:]), {}, step.random)
            self._note(storage, value)

    def _note(self, storage: Any, value: Value) -> None:
        key = storage._cdata
        values = self.values

        def died(reference: Any) -> None:
            if key in values and values[key][1] is reference:
                del values[key]

        values[key] = (value, weakref.ref(storage, died))

    def _wrote(self, func: Any, args: Any, places: list[int] | None, step: Step | None) -> None:
        """An op wrote in place. Only a recomputed op's write to a value that is made again can be made again."""
        written = [args[place] for place in places] if places is not None else tensors_in(args)
        for tensor in written:
            storage = tensor.untyped_storage()
            self.labeller.made(func, storage._cdata, in_place=True)
            before = self._value(tensor)
            self.values.pop(storage._cdata, None)
            if step and before and places == [0]:
                step.written = View(before, tensor)
                step.arguments = (None, *step.arguments[1:])
                value = Value(step, 0, tensor.dtype)
                step.made.append(weakref.ref(value))
                self._note(storage, value)


_depth = 0


def replaying() -> bool:
    """Whether ops run again now: what they do is recomputation, whichever module they once ran in."""
    return _depth > 0


def unpack(saved: Any) -> Tensor:
    """What backward asks for: a kept tensor, one that outer hooks keep, or a value made again."""
    global _depth
    if isinstance(saved, Tensor):
        return saved
    if isinstance(saved, View):
        if saved.value.tensor is not None:
            return saved.restore()
        _depth += 1
        try:
            with torch.no_grad(), torch.autocast(saved.device, enabled=False):
                return saved.restore()
        finally:
            _depth -= 1
    packed, outer_unpack = saved
    tensor: Tensor = outer_unpack(packed)
    return tensor
