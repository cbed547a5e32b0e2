"""One configuration judged: what it needs, how fast it is, whether everything it needs is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from engine.catalog import gpu
from engine.closed_form.fits import usable_bytes
from engine.closed_form.hardware import NODE_GPUS
from engine.closed_form.residency import residency
from engine.closed_form.timing import timing
from engine.closed_form.training import walk_step
from engine.spec import LARGEST_SIZE, RunSpec
from engine.units import format_bytes


class Candidate(BaseModel):
    """A configuration and its predicted cost on one rank."""

    model_config = ConfigDict(frozen=True)

    spec: RunSpec
    fits: bool
    device_peak_bytes: int
    host_peak_bytes: int
    nvme_bytes: int
    step_seconds: float | None
    tokens_per_second: float | None
    """On one GPU."""
    hardware_flops: int
    reason: str = ""

    @property
    def speed(self) -> float:
        """Larger is faster: tokens a second, or where no time is known, tokens a FLOP."""
        return self.tokens_per_second or self.spec.tokens_per_step / self.hardware_flops


@dataclass(frozen=True, slots=True)
class Limits:
    """What there is: usable bytes of one card, host bytes and NVMe bytes for one rank."""

    device: int
    host: int
    nvme: int

    def missing(self, device: int, host: int, nvme: int) -> str:
        """Which limit is broken, by how much; empty where none is."""
        for name, needed, there in (
            ("the GPU", device, self.device),
            ("host memory", host, self.host),
            ("NVMe", nvme, self.nvme),
        ):
            if needed > there:
                return f"needs {format_bytes(needed)} of {name}, {format_bytes(there)} are usable"
        return ""


def limits(card: str, gpus: int, host_memory_gib: float, nvme_gib: float) -> Limits:
    """A node's host memory and NVMe are shared by its ranks."""
    sharing = min(gpus, NODE_GPUS)
    return Limits(
        usable_bytes(gpu(card), gpus), int(host_memory_gib * 2**30) // sharing, int(nvme_gib * 2**30) // sharing
    )


def judge(spec: RunSpec, there: Limits) -> Candidate:
    """Predict a training spec and hold it against the limits."""
    step, place = walk_step(spec), residency(spec)
    cost = timing(spec, step.schedule, step.hosted_bytes)
    host = place.host + step.hosted_bytes
    missing = there.missing(step.meter.peak, host, place.nvme)
    return Candidate(
        spec=spec,
        fits=not missing,
        device_peak_bytes=step.meter.peak,
        host_peak_bytes=host,
        nvme_bytes=place.nvme,
        step_seconds=cost.step_seconds,
        tokens_per_second=cost.tokens_per_second,
        hardware_flops=cost.hardware_flops or 1,
        reason=missing,
    )


def varied(spec: RunSpec, **changes: Any) -> RunSpec:
    """`spec` with other values. They are the planner's own and make sense together, so they are not checked again."""
    return spec.model_copy(update=changes)


def micro_batches(spec: RunSpec) -> list[int]:
    """Micro-batches, largest first, that make the spec's sequences a step with some gradient accumulation."""
    sequences = spec.micro_batch * spec.grad_accumulation
    sizes = (sequences // count for count in range(1, 4097) if sequences % count == 0)
    return [size for size in sizes if size <= LARGEST_SIZE]


def at_best_micro_batch(spec: RunSpec, there: Limits) -> Candidate:
    """The fastest micro-batch that fits, at the same sequences a step; the smallest one where none fits."""
    sequences = spec.micro_batch * spec.grad_accumulation
    last: Candidate | None = None
    for size in micro_batches(spec):
        last = judge(varied(spec, micro_batch=size, grad_accumulation=sequences // size), there)
        if last.fits:
            return last
    assert last is not None
    return last
