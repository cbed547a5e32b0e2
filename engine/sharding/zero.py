"""What each of W ranks keeps (ZeRO, Rajbhandari et al. 2020, arXiv 1910.02054). Gradients are averaged over the ranks.

| stage  | parameters | gradients | optimizer states |
|--------|------------|-----------|------------------|
| none   | all        | all       | all              |
| zero-1 | all        | all       | 1/W              |
| zero-2 | all        | 1/W       | 1/W              |
| zero-3 | 1/W        | 1/W       | 1/W              |

Stages 1 and 2 keep the parameters of a unit (a block, or the rest) in one flat tensor of which each rank owns a
slice: gradients are reduce-scattered to the owner, its slice is updated, and the slices are gathered in place.
Stage 3 is torch's FSDP2, on a CPU with collectives of our own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from engine.optimizers import DeviceOptimizer, clip
from engine.recipes import Recipe
from engine.spec import Optimizer as OptimizerName
from engine.spec import Sharding

# Renamed in torch 2.13, which warns about the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def borrowed(tensor: Tensor) -> Tensor:
    """The memory of a contiguous CPU tensor as a flat one that does not own it.

    A collective's own thread may be the last to let go of a tensor: its memory would be freed at no known time, by a
    thread that the profiler does not watch. A fake tensor has no memory, and no thread holds it.
    """
    if isinstance(tensor, FakeTensor):
        return tensor.view(-1)
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype)


def reduce_scatter(own: Tensor, whole: Tensor) -> None:
    """Sum `whole` over the ranks; `own` gets this rank's slice. On a CPU `whole` changes."""
    if dist.get_backend() != "gloo":
        _reduce_scatter(own, whole)
    else:  # gloo has none: torch emulates it on a copy
        dist.all_reduce(borrowed(whole))
        own.copy_(whole.view(-1, own.numel())[dist.get_rank()])


def all_gather(whole: Tensor, own: Tensor) -> None:
    """`whole` gets every rank's slice."""
    if dist.get_backend() != "gloo":
        _all_gather(whole, own)
    else:
        slices = whole.view(-1, own.numel())
        slices[dist.get_rank()].copy_(own)
        for rank, slice in enumerate(slices):  # gloo's own all-gather takes a copy of the whole
            dist.broadcast(borrowed(slice), src=rank)


def add_up(scalar: Tensor) -> None:
    """Sum a scalar over the ranks, in place. FSDP2's policy may have it on the host, where NCCL does not reach."""
    if dist.get_backend() == "nccl":
        total = scalar.cuda()
        dist.all_reduce(total)
        scalar.copy_(total)
    else:
        dist.all_reduce(borrowed(scalar))


class _Allocates:
    """Where FSDP2's buffers come from. torch does not export its interfaces of a collective: these have its methods."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CpuAllGather(_Allocates):
    """FSDP2's all-gather by ours. It has one process group: the default one."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        all_gather(output_tensor, input_tensor)


class CpuReduceScatter(_Allocates):
    """FSDP2's reduce-scatter by ours: the mean, which it asks for in every dtype that we train in."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        reduce_scatter(output_tensor, input_tensor)
        output_tensor.div_(group.size())


@dataclass(eq=False)
class FlatUnit:
    """Parameters that are views of one flat tensor, padded to a multiple of the ranks."""

    parameters: list[Tensor]
    flat: Tensor
    own: Tensor
    """This rank's slice of `flat`."""
    grad: Tensor | None = None
    """This rank's slice of the averaged gradient."""
    arrived: set[int] = field(default_factory=set)


@torch.no_grad()
def flatten(parameters: Sequence[Tensor], rank: int, world_size: int) -> FlatUnit:
    """Move parameters of one dtype into one flat tensor, whose views they become."""
    count = sum(parameter.numel() for parameter in parameters)
    share = -(-count // world_size)
    flat = parameters[0].new_zeros(share * world_size, requires_grad=False)
    start = 0
    for parameter in parameters:
        view = flat[start : start + parameter.numel()].view_as(parameter)
        view.copy_(parameter)
        parameter.data = view
        start += parameter.numel()
    return FlatUnit(list(parameters), flat, flat[rank * share : (rank + 1) * share])


class ReplicatedOptimizer(DeviceOptimizer):
    """Plain data parallelism: every rank holds everything and does the same update."""

    def __init__(
        self, parameters: Sequence[Tensor], recipe: Recipe, optimizer: OptimizerName, max_norm: float | None = None
    ) -> None:
        super().__init__(parameters, recipe, optimizer, max_norm)
        self.world_size = dist.get_world_size()

    @torch.no_grad()
    def step(self) -> None:
        for slot in self.slots:
            if slot.parameter.grad is not None:
                dist.all_reduce(slot.parameter.grad)
                slot.parameter.grad.div_(self.world_size)
        super().step()


class FlatOptimizer(DeviceOptimizer):
    """ZeRO-1 and ZeRO-2. `early`: gradients are scattered as soon as a unit's are complete, in every micro-batch."""

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        recipe: Recipe,
        optimizer: OptimizerName,
        max_norm: float | None = None,
        *,
        early: bool,
    ) -> None:
        self.world_size = dist.get_world_size()
        self.keeps_shares = early or max_norm is not None  # of every unit's gradients until the last one is there
        self.units = [flatten(group, dist.get_rank(), self.world_size) for group in groups]
        super().__init__([unit.own for unit in self.units], recipe, optimizer, max_norm)
        largest = max((unit.flat for unit in self.units), key=Tensor.numel)
        # Kept, since a collective's own thread may be the last to let go of a buffer: it would die at no known time.
        self.whole, self.share = torch.empty_like(largest), largest.new_empty(largest.numel() // self.world_size)
        self.buffers = (self.whole, self.share)
        if early:
            for unit in self.units:
                for index, parameter in enumerate(unit.parameters):
                    parameter.register_post_accumulate_grad_hook(lambda _, u=unit, i=index: self._arrive(u, i))

    def _arrive(self, unit: FlatUnit, index: int) -> None:
        unit.arrived.add(index)
        if len(unit.arrived) == len(unit.parameters):
            self._scatter(unit)

    @torch.no_grad()
    def _scatter(self, unit: FlatUnit) -> None:
        """Sum the unit's gradients over the ranks, keep this rank's slice of the mean, and drop them."""
        whole, own = self.whole[: unit.flat.numel()].zero_(), self.share[: unit.own.numel()]
        start = 0
        for parameter in unit.parameters:
            if parameter.grad is not None:
                whole[start : start + parameter.numel()].view_as(parameter).copy_(parameter.grad)
            parameter.grad = None
            start += parameter.numel()
        reduce_scatter(own, whole)
        own.div_(self.world_size)
        if unit.grad is not None:
            unit.grad.add_(own)
        else:
            unit.grad = own.clone() if self.keeps_shares else own
        unit.arrived.clear()

    def _own_gradient(self, unit: FlatUnit) -> Tensor:
        if unit.grad is None or unit.arrived:
            self._scatter(unit)
        assert unit.grad is not None
        return unit.grad

    @torch.no_grad()
    def step(self) -> None:
        if self.max_norm is not None:
            clip([self._own_gradient(unit) for unit in self.units], self.max_norm, add_up)
        for unit, slot in zip(self.units, self.slots, strict=True):
            self.apply(slot, self._own_gradient(unit))
            unit.grad = None
            all_gather(unit.flat, self.share[: unit.own.numel()].copy_(unit.own))


class ShardedOptimizer(DeviceOptimizer):
    """ZeRO-3: FSDP2 keeps each rank's rows of every parameter and gradient; this updates them where they are."""

    def __init__(
        self, parameters: Sequence[Tensor], recipe: Recipe, optimizer: OptimizerName, max_norm: float | None = None
    ) -> None:
        self.parameters = list(parameters)
        super().__init__([_local(parameter) for parameter in self.parameters], recipe, optimizer, max_norm)

    @torch.no_grad()
    def step(self) -> None:
        if self.max_norm is not None:
            gradients = [parameter.grad for parameter in self.parameters]
            clip([_local(grad) for grad in gradients if grad is not None], self.max_norm, add_up)
        for parameter, slot in zip(self.parameters, self.slots, strict=True):
            if parameter.grad is not None and slot.parameter.numel():
                slot.parameter = _local(parameter)
                self.apply(slot, _local(parameter.grad))
            parameter.grad = None


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()


def shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    stage: Sharding,
    recipe: Recipe,
    optimizer: OptimizerName,
    *,
    offload: bool = False,
    max_norm: float | None = None,
) -> DeviceOptimizer:
    """Spread `model` over the process group that is there; the optimizer of this rank.

    `offload` (ZeRO-3 on CUDA): the shards of parameters, gradients and states live in host memory. `max_norm` clips
    the norm of the averaged gradients of all ranks.
    """
    if stage == "none":
        return ReplicatedOptimizer(list(model.parameters()), recipe, optimizer, max_norm)
    if stage == "zero-3":
        device = next(model.parameters()).device.type
        with unset_fake_temporarily():  # the mesh reads its ranks' numbers, which a simulation has too
            mesh = init_device_mesh(device, (dist.get_world_size(),))
        policy = CPUOffloadPolicy() if offload else OffloadPolicy()
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh, offload_policy=policy)
            if device == "cpu" and isinstance(module, FSDPModule):
                gather, scatter = cast(Any, CpuAllGather()), cast(Any, CpuReduceScatter())
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(scatter)
        return ShardedOptimizer(list(model.parameters()), recipe, optimizer, max_norm)
    inside = {parameter for block in blocks for parameter in block.parameters()}
    rest = [parameter for parameter in model.parameters() if parameter not in inside]
    groups = [list(block.parameters()) for block in blocks]
    return FlatOptimizer([*groups, rest], recipe, optimizer, max_norm, early=stage == "zero-2")
