"""The table of policies. A policy turns (layers, parsed name, spec) into a tree; one function runs any tree."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from engine.checkpoint_names import Checkpointing, Kind
from engine.checkpointing import tree
from engine.checkpointing.segments import wrap_region
from engine.checkpointing.selective import SelectiveBlock, Unmatched
from engine.checkpointing.tree import Keep, Region, Selective, Tree


def keep_all(layers: int, _plan: Checkpointing) -> Tree:
    return tuple(Keep(block) for block in range(layers))


def segments(layers: int, plan: Checkpointing) -> Tree:
    return tree.segments(layers, plan.segment_length(layers))


def selective(layers: int, plan: Checkpointing) -> Tree:
    groups = plan.groups or ("norms", "attention-core", "mlp-activation")
    return tuple(Selective(block, groups) for block in range(layers))


def nested(layers: int, _plan: Checkpointing) -> Tree:
    return tree.nested(layers)


POLICIES: dict[Kind, Callable[[int, Checkpointing], Tree]] = {
    "none": keep_all,
    "segments": segments,
    "selective": selective,
    "nested": nested,
}


def apply_checkpointing(blocks: nn.ModuleList, plan: Checkpointing, *, dropout: bool) -> None:
    """Wrap `blocks` in place so that running them in order follows the policy. Call once, after initialisation."""
    apply_tree(blocks, POLICIES[plan.kind](len(blocks), plan), dropout=dropout)


def apply_tree(blocks: nn.ModuleList, nodes: Tree, *, dropout: bool) -> None:
    unmatched = Unmatched(
        {g for n in nodes if isinstance(n, Selective) for g in n.groups}, sum(isinstance(n, Selective) for n in nodes)
    )
    for node in nodes:
        if isinstance(node, Region):
            wrap_region(blocks, node, dropout)
        elif isinstance(node, Selective):
            blocks[node.block] = SelectiveBlock(blocks[node.block], node.groups, dropout, unmatched)
