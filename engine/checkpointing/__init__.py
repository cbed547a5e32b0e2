"""Activation checkpointing: each policy wraps a model's list of blocks. Adding one is adding a row to `POLICIES`."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from engine.checkpoint_names import Checkpointing, Kind
from engine.checkpointing.segments import keep_all, segments

Policy = Callable[[nn.ModuleList, Checkpointing, bool], None]
"""(blocks, parsed name, has dropout): replaces the entries of `blocks` in place."""

POLICIES: dict[Kind, Policy] = {
    "none": keep_all,
    "segments": segments,
}


def apply_checkpointing(blocks: nn.ModuleList, plan: Checkpointing, *, dropout: bool) -> None:
    """Wrap `blocks` in place so that running them in order follows the policy. Call once, after initialisation."""
    POLICIES[plan.kind](blocks, plan, dropout)
