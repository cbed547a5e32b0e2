"""Which op group an operator belongs to while a block runs: by the submodule it runs in, its kind, and its place.

| where                            | group                                                                         |
|----------------------------------|-------------------------------------------------------------------------------|
| a norm module                    | `norms`                                                                       |
| a projection of an attention     | `attention-out` if named so, else `qkv`                                       |
| an attention, outside those      | `qkv` before the core begins (rotary), `attention-core` in it, `attention-out`|
|                                  | behind it (the copy that lays heads side by side); a mere copy of q, k or v   |
|                                  | for the core (by head, or cast) is `qkv`                                      |
| a projection of an MLP           | `mlp-out` if named so, else `mlp-in`                                          |
| an MLP, outside those            | `mlp-activation`; a bare matmul (experts): `mlp-in`, behind an activation      |
|                                  | `mlp-out`                                                                     |
| `fc1`, `activation_fn`, `fc2`    | `mlp-in`, `mlp-activation`, `mlp-out`, where the block has no MLP module       |
| dropout, anywhere                | `dropout`: the mask, and what is multiplied by it                             |
| the block itself (residual sums) | the group of the branch that ends there: `attention-out` or `mlp-out`          |

Modules are told apart by what transformers' families and our decoder call them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint_names import OP_GROUPS

aten = torch.ops.aten

FUSED_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,  # missing from torch's own lists of such operators
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
    aten._flash_attention_forward.default,
    aten._efficient_attention_forward.default,
}
OURS = re.compile(r"remat(::|\.).*attention")
"""Our attention kernels are operators of the `remat` namespace with this in their name."""

PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._grouped_mm.default}
CORE_BEGINS = {aten.new_full.default, aten._softmax.default, aten._safe_softmax.default}
"""Beside products: the causal bias, and the softmax."""
COPIES = {aten.clone.default, aten._to_copy.default}
"""Of q, k or v for the products: whole heads one after the other, or the dtype that autocast wants."""
CORE_PRODUCTS = 2  # QKᵀ and PV; a fused kernel is both

NOISE = {aten.native_dropout.default, aten.bernoulli_.float, aten.bernoulli.p}

ACTIVATIONS = {aten.silu.default, aten.gelu.default, aten.relu.default, aten.sigmoid.default, aten.tanh.default}

ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
MLP = re.compile(r"mlp|feed_?forward|ffn|moe|experts|(?<!self)densereludense", re.IGNORECASE)
NORM = re.compile(r"norm", re.IGNORECASE)
ATTENTION_OUT = re.compile(r"^(o|out|o_proj|out_proj|c_proj|dense|wo|output|linear_out)$", re.IGNORECASE)
BARE_MLP = {"fc1": "mlp-in", "activation_fn": "mlp-activation", "fc2": "mlp-out"}
"""Of families (OPT, XGLM) that have no MLP module: its parts are the block's own."""
MLP_OUT = re.compile(r"^(down|down_proj|c_proj|fc2|fc_out|w2|wo|dense_4h_to_h|output|lin2|out_proj)$", re.IGNORECASE)


def role_of(name: str, module: nn.Module, scope: str) -> str | None:
    """The role of a submodule called `name` inside `scope` ("attention", "mlp" or ""), or None if it has none."""
    kind = type(module).__name__
    if NORM.search(kind):
        return "norms"
    if isinstance(module, nn.Dropout) or kind == "Dropout":
        return "dropout"
    if scope == "":
        if ATTENTION.search(kind) or ATTENTION.search(name):
            return "attention"
        return "mlp" if MLP.search(kind) or MLP.search(name) else BARE_MLP.get(name)
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.dim() == 2:
        if scope == "attention":
            return "attention-out" if ATTENTION_OUT.match(name) else "qkv"
        return "mlp-out" if MLP_OUT.match(name) else "mlp-in"
    if scope == "mlp" and not list(module.children()) and not list(module.parameters()):
        return "mlp-activation"
    return None


def roles(block: nn.Module) -> Iterable[tuple[nn.Module, str]]:
    """Each submodule of a block that has a role, with it. A module inside one that has a group is of that group."""
    pending = [(name, child, "") for name, child in block.named_children()]
    while pending:
        name, module, scope = pending.pop()
        role = role_of(name, module, scope)
        if role is not None:
            yield module, role
        if role in OP_GROUPS:
            continue
        inner = role or scope
        pending += [(child_name, child, inner) for child_name, child in module.named_children()]


@dataclass
class Labeller:
    """Follows one run of a block and names the group of each operator in it."""

    stack: list[str] = field(default_factory=lambda: [""])
    branch: str = ""
    core_products: int = 0
    core_begun: bool = False
    activated: bool = False
    noise: set[int] = field(default_factory=set)
    """Storages that hold dropout noise."""
    core: set[int] = field(default_factory=set)
    """Storages that the attention's core made."""
    newest: str = ""
    """The group of the newest operator."""

    def enter(self, role: str) -> None:
        if role == "attention":
            self.core_products, self.core_begun = 0, False
            self.core.clear()
        if role in ("attention-out", "mlp-out"):
            self.branch = role
        if role == "mlp-activation":
            self.activated = True
        self.stack.append(role)

    def leave(self) -> None:
        if len(self.stack) > 1:
            self.stack.pop()

    def group(self, func: Any, inputs: Sequence[Tensor]) -> str:
        """The group of an operator that reads these tensors; "" where it has none."""
        self.newest = self._group(func, inputs)
        return self.newest

    def _group(self, func: Any, inputs: Sequence[Tensor]) -> str:
        if self.stack[-1] == "dropout" or func in NOISE or _any_in(inputs, self.noise):
            return "dropout"
        match self.stack[-1]:
            case "attention":
                return self._attention(func, inputs)
            case "mlp":
                return self._mlp(func)
            case "":
                return self.branch
            case group:
                return group

    def made(self, func: Any, storage: int, *, in_place: bool) -> None:
        """The newest operator made this storage, or wrote to it."""
        if func in NOISE and func is not aten.native_dropout.default:
            self.noise.add(storage)
        elif not in_place:
            self.noise.discard(storage)
        if self.newest == "attention-core":
            self.core.add(storage)
        elif not in_place:
            self.core.discard(storage)

    def _attention(self, func: Any, inputs: Sequence[Tensor]) -> str:
        if self.core_products >= CORE_PRODUCTS:
            self.branch = "attention-out"
            return "attention-out"
        if func in COPIES and not _any_in(inputs, self.core):
            return "attention-core" if _enlarges(func, inputs[0]) else "qkv"
        if func in FUSED_ATTENTION or OURS.match(str(func)):
            self.core_products = CORE_PRODUCTS
            return "attention-core"
        self.core_products += func in PRODUCTS
        self.core_begun |= func in PRODUCTS or func in CORE_BEGINS
        return "attention-core" if self.core_begun else "qkv"

    def _mlp(self, func: Any) -> str:
        self.activated |= func in ACTIVATIONS
        if func not in PRODUCTS:
            return "mlp-activation"
        group = "mlp-out" if self.activated else "mlp-in"
        self.activated = False
        self.branch = "mlp-out"
        return group


def _any_in(tensors: Iterable[Tensor], storages: set[int]) -> bool:
    return bool(storages) and any(tensor.untyped_storage()._cdata in storages for tensor in tensors)


def _enlarges(func: Any, tensor: Tensor) -> bool:
    """Whether a copy of a tensor holds more than it: keys repeated for grouped queries, or cast up."""
    repeated = 0 in tensor.stride() and tensor.nbytes > tensor.untyped_storage().nbytes()
    return repeated or (func is aten._to_copy.default and tensor.itemsize < torch.float32.itemsize)


RUNNING: list[Labeller] = []
"""The labellers of the blocks that run now, innermost last."""


@contextmanager
def labelling() -> Iterator[Labeller]:
    """Follow one run of a block that is watched."""
    labeller = Labeller()
    RUNNING.append(labeller)
    try:
        yield labeller
    finally:
        RUNNING.pop()


def watch(block: nn.Module) -> None:
    """Hooks that tell a running labeller which submodule runs; they do nothing when there is none."""
    for module, role in roles(block):
        module.register_forward_pre_hook(partial(_enter, role))
        module.register_forward_hook(_leave, always_call=True)


def _enter(role: str, _module: nn.Module, _inputs: Any) -> None:
    if RUNNING:
        RUNNING[-1].enter(role)


def _leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
    if RUNNING:
        RUNNING[-1].leave()
