"""What fake tensors cannot say of themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode


def run(func: Any, args: Any, options: Any) -> Any:
    """Call an operator. The shape rule of `_grouped_mm` refuses what its CPU kernel takes: ask in bf16, answer in the
    dtype asked for."""
    if func is not torch.ops.aten._grouped_mm.default or not isinstance(args[0], FakeTensor):
        return func(*args, **options)
    matrices = [matrix.to(torch.bfloat16) for matrix in args[:2]]
    output = func(*matrices, *args[2:], **options)
    return output.new_empty_strided(output.shape, output.stride(), dtype=args[0].dtype)


class Corrected(TorchDispatchMode):
    """`run` for every operator, backward's too."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})
