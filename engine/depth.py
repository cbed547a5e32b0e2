"""Which shallow models stand for a deep one: how often a model's blocks repeat, and the same model with fewer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.architecture import Architecture
from engine.checkpoint_names import Checkpointing
from engine.extrapolate import Depths
from engine.models.huggingface import transformers_config


def shallow_depth(arch: Architecture, plan: Checkpointing, *, reach: int = 1) -> Depths | None:
    """The depths that tell the step at full depth, where a block's storages live on for at most `reach` blocks more.

    None where that saves nothing, or where the policy's schedule is not a repetition (`nested`, `budget`).
    """
    segment = {"none": 1, "selective": 1, "segments": plan.segment_length(arch.layers)}.get(plan.kind)
    if segment is None:
        return None
    period = math.lcm(segment, _pattern_period(arch))
    edge = -(-reach // period)
    blocks = (2 * edge + 1) * period + arch.layers % period
    return Depths(blocks, period, edge) if 2 * blocks + period < arch.layers else None


def sample_depth(arch: Architecture) -> int:
    """Blocks enough to have one of every kind, and two in a row."""
    return max(2, _pattern_period(arch))


def fixed_plan(arch: Architecture, plan: Checkpointing) -> Checkpointing:
    """The plan with √L replaced by what it comes to at full depth, so that a shallow model runs the same segments."""
    return replace(plan, every=plan.segment_length(arch.layers)) if plan.kind == "segments" else plan


def at_depth(arch: Architecture, blocks: int) -> Architecture:
    """The same model with fewer blocks."""
    if not arch.runs_transformers:
        return replace(arch, layers=blocks)
    config = transformers_config(arch)
    name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    fields = {
        key: value[:blocks] if _is_per_layer(value, arch.layers) else value for key, value in config.to_dict().items()
    }
    return replace(arch, layers=blocks, config=fields | {name: blocks})


def _is_per_layer(value: Any, layers: int) -> bool:
    return isinstance(value, list) and len(value) == layers


def _pattern_period(arch: Architecture) -> int:
    """After how many blocks the layer types (sliding and full attention, dense and expert MLPs) repeat."""
    if not arch.runs_transformers:
        return 1
    fields: Mapping[str, Any] = transformers_config(arch).to_dict()
    everywhere = list(range(arch.layers))  # which layers have something, not what each layer is
    patterns = [value for value in fields.values() if _is_per_layer(value, arch.layers) and value != everywhere]
    return math.lcm(*(_period(pattern) for pattern in patterns)) if patterns else 1


def _period(pattern: Sequence[Any]) -> int:
    return next(
        p for p in range(1, len(pattern) + 1) if all(a == b for a, b in zip(pattern, pattern[p:], strict=False))
    )
