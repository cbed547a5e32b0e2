"""Where parameters, gradients and optimizer states live: on this rank's device, on its host, or in its NVMe file.

ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054): stage 1 shards the states over W ranks, stage 2 the gradients too,
stage 3 the parameters too; a stage-3 rank holds unsharded only the blocks at work. Offloaded states never touch the
device, and gradients leave it as soon as they are made (ZeRO-Offload, arXiv 2101.06840).
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.architecture import Architecture
from engine.closed_form.lower import tier_bytes
from engine.closed_form.states import block_parameters, optimizer_state_bytes, parameter_elements
from engine.offload.layout import LANDING_BUFFERS
from engine.recipes import DTYPE_BYTES, RECIPES
from engine.spec import RunSpec

PREFETCHED = 2
"""Blocks whose parameters are on the device at once: the one that runs, and the next one on its way."""


@dataclass(frozen=True, slots=True)
class Residency:
    """Bytes by place, for one rank."""

    parameters: int
    working_parameters: int
    """Unsharded or fetched copies of the blocks at work."""
    buffers: int
    """What collectives need: for ZeRO-1 and ZeRO-2 the largest unit (a block, or the rest), whole and sliced; for
    FSDP2 a gathered block before it is copied out, and a block's gradients before and after they are scattered."""
    gathers: bool
    """FSDP2 gathers and scatters as the step walks: `engine.closed_form.gathering` counts what that takes."""
    states: int
    gradient_share: float
    """What stays of a gradient once its block's backward is over."""
    gradients_leave: bool
    """Each gradient goes to the host when it is made."""
    host: int
    nvme: int
    nvme_written: int
    """Bytes written to NVMe a step."""


def _share(count: int, ranks: int) -> int:
    return -(-count // ranks)


def residency(spec: RunSpec) -> Residency:
    """Where a training spec's parameters, gradients and states are."""
    arch, recipe, ranks = spec.architecture, RECIPES[spec.precision], spec.world_size
    size = DTYPE_BYTES[recipe.weight]
    weights = parameter_elements(arch) * size
    blocks = block_bytes(arch, recipe.weight) * arch.layers
    states = optimizer_state_bytes(arch, recipe, spec.optimizer)
    stage = int(spec.sharding[-1]) if spec.sharding != "none" else 0
    states = _share(states, ranks if stage >= 1 else 1)
    lower = spec.offload_optimizer
    moved = spec.offload_parameters != "none"
    sharded = stage == 3 and ranks > 1
    on_device, working = weights, 0
    gathers = sharded and not moved
    if moved or sharded:
        at_work = min(PREFETCHED if spec.offload_overlap or sharded else 1, arch.layers)
        working = blocks // arch.layers * at_work
        outside = weights - blocks
        on_device = outside if moved else _share(weights, ranks)
    rank_weights = _share(weights, ranks if stage == 3 else 1)
    landing = min(weights, LANDING_BUFFERS * (blocks // arch.layers))
    gradients = _share(weights, ranks if stage >= 2 else 1)
    host, nvme, written = 0, 0, 0
    if lower == "cpu":
        host = rank_weights + states + gradients
    elif lower == "nvme":
        stored = states + (rank_weights if moved or not recipe.master else 0)
        host, nvme, written = landing + 2 * _share(states + rank_weights, arch.layers), rank_weights + states, stored
        if spec.offload_parameters == "cpu":
            host += rank_weights
    if lower != "none" and (stage == 0 or ranks == 1):
        host, nvme, written = tier_bytes(
            arch, recipe, spec.optimizer, tier=lower, parameters=spec.offload_parameters,
            early=spec.offload_overlap and spec.max_grad_norm is None, accumulation=spec.grad_accumulation,
        )  # fmt: skip
    return Residency(
        parameters=on_device,
        working_parameters=0 if gathers else working,
        buffers=0 if gathers else _collective_bytes(stage, ranks, blocks // arch.layers, weights - blocks),
        gathers=gathers,
        states=states if lower == "none" else 0,
        gradient_share=1 / ranks if stage >= 2 else 1.0,
        gradients_leave=lower != "none",
        host=host,
        nvme=nvme,
        nvme_written=written,
    )


def _collective_bytes(stage: int, ranks: int, block: int, rest: int) -> int:
    if stage == 0 or (stage == 3 and ranks == 1):
        return 0
    return (2 * block if stage == 3 else max(block, rest)) + (block if stage == 3 else max(block, rest)) // ranks


def block_bytes(arch: Architecture, dtype: str) -> int:
    """Parameter bytes of one block (the mean, where blocks differ)."""
    return sum(p.elements * p.count for p in block_parameters(arch)) // arch.layers * DTYPE_BYTES[dtype]
