"""The table of policies. A policy makes a tree of a number of blocks; one function runs any tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from engine.checkpoint_names import Checkpointing, Kind
from engine.checkpointing import tree
from engine.checkpointing.budget import plan_budget
from engine.checkpointing.profiling import profile
from engine.checkpointing.rng import check_replayable
from engine.checkpointing.segments import wrap_region
from engine.checkpointing.selective import SelectiveBlock, Unmatched
from engine.checkpointing.tree import Keep, Region, Selective, Tree
from engine.checkpointing.worth import best_groups, default_groups, plan_rates
from engine.errors import UnsupportedError
from engine.spec import RunSpec


@dataclass(frozen=True, slots=True)
class Wish:
    """What a policy is asked for."""

    layers: int
    plan: Checkpointing
    spec: RunSpec | None

    @property
    def known_spec(self) -> RunSpec:
        if self.spec is None:
            raise UnsupportedError("checkpointing", f"{self.plan.kind} derives its plan from a spec, and there is none")
        return self.spec


Answer = tuple[Tree, str]
"""The tree, and what a person should know of it ("" if the policy's name says it all)."""


def keep_all(wish: Wish) -> Answer:
    return tuple(Keep(block) for block in range(wish.layers)), ""


def segments(wish: Wish) -> Answer:
    return tree.segments(wish.layers, wish.plan.segment_length(wish.layers)), ""


def nested(wish: Wish) -> Answer:
    return tree.nested(wish.layers), ""


def selective(wish: Wish) -> Answer:
    """The named groups, or those that free half of a block's bytes at best value."""
    groups, note = wish.plan.groups, ""
    if groups is None:
        spec = wish.known_spec
        if spec.runs_transformers:
            groups = best_groups(profile(spec).tapes[0], plan_rates(spec))
        else:
            groups = default_groups(spec)
        note = f"checkpointing: selective recomputes {' + '.join(groups)}"
    return tuple(Selective(block, groups) for block in range(wish.layers)), note


def budget(wish: Wish) -> Answer:
    spec = wish.known_spec
    measured = profile(spec)
    if len(measured.tapes) != wish.layers:
        raise UnsupportedError("checkpointing", "budget-F plans one stack of blocks; this model has several")
    plan = plan_budget(measured, wish.plan.budget, plan_rates(spec))
    return plan.tree, f"checkpointing: {spec.checkpointing}: {plan}"


POLICIES: dict[Kind, Callable[[Wish], Answer]] = {
    "none": keep_all,
    "segments": segments,
    "selective": selective,
    "nested": nested,
    "budget": budget,
}


def apply_checkpointing(
    blocks: nn.ModuleList, plan: Checkpointing, *, dropout: bool, spec: RunSpec | None = None
) -> str:
    """Wrap `blocks` in place so that running them in order follows the policy. Call once, after initialisation.

    Returns a note on a plan that was derived, for the run's notes, or "". Raises UnsupportedError if a plan is to be
    derived without a spec, if no plan keeps to a budget, or if dropout masks could not be replayed on the device.
    """
    nodes, note = POLICIES[plan.kind](Wish(len(blocks), plan, spec))
    apply_tree(blocks, nodes, dropout=dropout)
    return note


def apply_tree(blocks: nn.ModuleList, nodes: Tree, *, dropout: bool) -> None:
    """Wrap `blocks` in place as a tree says."""
    if dropout and any(not isinstance(node, Keep) for node in nodes):
        check_replayable(next((parameter.device for parameter in blocks.parameters()), torch.device("cpu")))
    chosen = [node for node in nodes if isinstance(node, Selective)]
    unmatched = Unmatched({group for node in chosen for group in node.groups}, len(chosen))
    for node in nodes:
        if isinstance(node, Region):
            wrap_region(blocks, node, dropout)
        elif isinstance(node, Selective):
            blocks[node.block] = SelectiveBlock(blocks[node.block], node.groups, dropout, unmatched)
