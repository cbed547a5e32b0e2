"""Does it fit: the predicted peak against what a card really offers."""

from __future__ import annotations

from engine.catalog import Gpu, gpu
from engine.closed_form.hardware import COLLECTIVE_BYTES, CONTEXT_BYTES, FRAGMENTATION
from engine.result import Fits
from engine.spec import RunSpec
from engine.units import format_bytes


def usable_bytes(card: Gpu, world_size: int = 1) -> int:
    """A card's memory, less what the context, libraries and the allocator's gaps take."""
    collectives = COLLECTIVE_BYTES if world_size > 1 else 0
    return int(card.memory_bytes * (1 - FRAGMENTATION)) - CONTEXT_BYTES - collectives


def overdrawn(spec: RunSpec, reserved_bytes: int | None) -> list[str]:
    """A warning where the allocator would like to hold more than the card has beside context and libraries."""
    if spec.gpu is None or reserved_bytes is None:
        return []
    card = gpu(spec.gpu)
    room = card.memory_bytes - CONTEXT_BYTES - (COLLECTIVE_BYTES if spec.world_size > 1 else 0)
    if reserved_bytes <= room:
        return []
    return [
        f"the caching allocator would reserve {format_bytes(reserved_bytes)}, more than the {format_bytes(room)} that "
        f"the {card.name} has for it: it gives cached memory back and asks again in every step, which is slow, or fails"
    ]


def fits(spec: RunSpec, peak_bytes: int) -> Fits | None:
    """None where no `gpu` is named."""
    if spec.gpu is None:
        return None
    card = gpu(spec.gpu)
    limit = usable_bytes(card, spec.world_size)
    nccl = f", {format_bytes(COLLECTIVE_BYTES)} for NCCL" if spec.world_size > 1 else ""
    return Fits(
        fits=peak_bytes <= limit,
        headroom_bytes=limit - peak_bytes,
        limit_bytes=limit,
        assumes=(
            f"{format_bytes(limit)} of the {card.name}'s {format_bytes(card.memory_bytes)} are usable: "
            f"{format_bytes(CONTEXT_BYTES)} go to the CUDA context and library workspaces{nccl}, "
            f"{FRAGMENTATION:.0%} to the allocator's gaps; nothing else runs on the card"
        ),
    )
