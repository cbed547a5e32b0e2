"""The update rules of every precision recipe, on any device: fused AdamW, AdamW with 8-bit moments, SGD.

Where weights and moments share a dtype, one fused call updates every parameter. Otherwise parameters are updated one
at a time through an fp32 view of the gradient (and of the weight, without a master copy), so that the temporaries are
never larger than the largest parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from engine.recipes import BLOCK_8BIT, Recipe
from engine.spec import Optimizer as OptimizerName

LEARNING_RATE = 3e-4  # GPT-3's for models of this size; fixed, since Remat measures cost and not quality
BETAS = (0.9, 0.95)
EPSILON = 1e-8
WEIGHT_DECAY = 0.1

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(slots=True)
class Slot:
    """One parameter with its optimizer state. `tensors` is what a tier has to hold."""

    parameter: Tensor
    master: Tensor | None = None
    moments: list[Tensor] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)
    step: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        singles = [tensor for tensor in (self.master, self.step) if tensor is not None]
        return [*singles, *self.moments, *self.scales]


def make_slot(parameter: Tensor, recipe: Recipe, optimizer: OptimizerName) -> Slot:
    """The state of one parameter, on the parameter's device."""
    slot = Slot(parameter)
    if recipe.master:
        slot.master = parameter.detach().to(torch.float32, copy=True)
    if optimizer == "sgd":
        return slot
    slot.step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    if optimizer == "adamw-8bit":
        blocks = -(-parameter.numel() // BLOCK_8BIT)
        for _ in range(2):
            slot.moments.append(torch.zeros(parameter.numel(), dtype=torch.int8, device=parameter.device))
            slot.scales.append(torch.zeros(blocks, dtype=torch.float32, device=parameter.device))
    else:
        dtype = torch.promote_types(DTYPES[recipe.moment], parameter.dtype)  # a class may keep its router in fp32
        slot.moments = [torch.zeros_like(parameter, dtype=dtype, requires_grad=False) for _ in range(2)]
    return slot


def fused_adamw(weights: list[Tensor], grads: list[Tensor], slots: list[Slot]) -> None:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), in place, on tensors of one dtype and device."""
    adamw(
        weights, grads, [slot.moments[0] for slot in slots], [slot.moments[1] for slot in slots], [],
        [slot.step for slot in slots if slot.step is not None],
        fused=True, lr=LEARNING_RATE, beta1=BETAS[0], beta2=BETAS[1], weight_decay=WEIGHT_DECAY, eps=EPSILON,
        amsgrad=False, maximize=False,
    )  # fmt: skip


def _expand(codes: Tensor, scales: Tensor) -> Tensor:
    """int8 codes (n,) and one fp32 scale a block -> fp32 (n,). value = scale · (code / 127)³."""
    values = codes.to(torch.float32).div_(127).pow_(3)
    return values.mul_(scales.repeat_interleave(BLOCK_8BIT)[: values.numel()])


def _compress(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """The inverse of `_expand`, into `codes` and `scales`. The cube gives small moments their own codes, which a
    linear 8-bit code would flush to zero (the reason for Dettmers' dynamic code, arXiv 2110.02861)."""
    padded = torch.nn.functional.pad(values, (0, scales.numel() * BLOCK_8BIT - values.numel()))
    blocks = padded.view(-1, BLOCK_8BIT)
    scales.copy_(torch.linalg.vector_norm(blocks, ord=float("inf"), dim=1))
    relative = blocks.div_(scales.clamp(min=1e-30).unsqueeze(1)).flatten()[: values.numel()]
    codes.copy_(relative.abs().pow_(1 / 3).mul_(127).round_().mul_(relative.sign()))


def adamw_8bit(weight: Tensor, grad: Tensor, slot: Slot) -> None:
    """One AdamW step on an fp32 weight with block-wise 8-bit moments."""
    moments = [_expand(*pair).view_as(weight) for pair in zip(slot.moments, slot.scales, strict=True)]
    wide = Slot(weight, moments=moments, step=slot.step)
    fused_adamw([weight], [grad], [wide])
    for moment, codes, scales in zip(moments, slot.moments, slot.scales, strict=True):
        _compress(moment.flatten(), codes, scales)


def update(slot: Slot, grad: Tensor, optimizer: OptimizerName) -> None:
    """One step of one parameter whose state or weight is wider than its gradient."""
    weight = slot.master if slot.master is not None else slot.parameter.to(torch.float32)
    grad = grad.to(torch.float32)
    if optimizer == "adamw":
        fused_adamw([weight], [grad], [slot])
    elif optimizer == "adamw-8bit":
        adamw_8bit(weight, grad, slot)
    else:
        weight.mul_(1 - LEARNING_RATE * WEIGHT_DECAY).add_(grad, alpha=-LEARNING_RATE)
    if weight is not slot.parameter:
        slot.parameter.copy_(weight)


def clip(grads: Sequence[Tensor], max_norm: float, add_up: Callable[[Tensor], object] | None = None) -> None:
    """Scale gradients in place so that their global L2 norm is at most `max_norm` (Pascanu et al. 2013, arXiv
    1211.5063), as torch's clip_grad_norm_ does. `add_up` sums a scalar over the ranks that share the gradients.

    The norm is summed one gradient after another, so that whatever the device nothing but scalars is alive beside them.
    """
    squares = torch.zeros((), device=grads[0].device)
    for grad in grads:
        squares.add_(torch.linalg.vector_norm(grad).to(torch.float32).square_())
    if add_up is not None:
        add_up(squares)
    share = squares.sqrt_().add_(1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0)
    for grad in grads:
        grad.mul_(share)


class DeviceOptimizer:
    """The optimizer of a run that offloads nothing: every state beside its parameter."""

    buffers: Sequence[Tensor] = ()
    """What a sharded one keeps for its collectives between steps."""

    def __init__(
        self, parameters: Iterable[Tensor], recipe: Recipe, optimizer: OptimizerName, max_norm: float | None = None
    ) -> None:
        """`max_norm` clips the global gradient norm."""
        self.optimizer, self.max_norm = optimizer, max_norm
        self.slots = [make_slot(parameter, recipe, optimizer) for parameter in parameters]
        self.one_call = optimizer == "adamw" and recipe.weight == recipe.moment and not recipe.master

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient, and drop the gradients."""
        ready = [(slot, slot.parameter.grad) for slot in self.slots if slot.parameter.grad is not None]
        if self.max_norm is not None:
            clip([grad for _, grad in ready if grad is not None], self.max_norm)
        if self.one_call:
            slots = [slot for slot, _ in ready]
            fused_adamw([slot.parameter for slot in slots], [grad for _, grad in ready if grad is not None], slots)
        for slot, grad in ready:
            if not self.one_call and grad is not None:
                update(slot, grad, self.optimizer)
            slot.parameter.grad = None

    def apply(self, slot: Slot, grad: Tensor) -> None:
        """Update one slot alone, as a sharded optimizer does unit by unit."""
        if self.one_call:
            fused_adamw([slot.parameter], [grad], [slot])
        else:
            update(slot, grad, self.optimizer)

    def tensors(self) -> list[Tensor]:
        """Every state tensor, for accounting."""
        return [tensor for slot in self.slots for tensor in slot.tensors]
