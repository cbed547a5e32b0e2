"""What to run: the fastest configuration that fits, and the course's ladder beside it with each rung's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, Literal

from pydantic import BaseModel

from engine.catalog import gpu as find_gpu
from engine.closed_form.hardware import COLLECTIVE_BYTES, CONTEXT_BYTES, FRAGMENTATION
from engine.closed_form.pitfalls import half_quadratic_seq, quadratic_share
from engine.errors import SpecError, UnsupportedError
from engine.planning.candidates import Candidate, Limits, at_best_micro_batch, judge, limits, varied
from engine.planning.frontier import pareto
from engine.spec import RunSpec
from engine.units import format_bytes, format_seconds

Objective = Literal["throughput", "memory"]
OBJECTIVES: tuple[Objective, ...] = ("throughput", "memory")

LEAN = "selective:norms+attention-core+mlp-in+mlp-activation"
"""Everything inside a block but the attention's projections: between `selective` and `per-layer`."""

CHECKPOINTING = ("none", "selective", LEAN, "per-layer", "sqrt")
"""From most memory to least, of the ones worth trying on any model."""

LOSS_CHUNKS = 8
"""Logits in this many parts cost no time (the fused loss makes none of them twice) and an eighth of the memory."""

NEUTRAL: dict[str, Any] = {
    "checkpointing": "none", "offload_optimizer": "none", "offload_parameters": "none", "offload_activations": "none",
    "sharding": "none",
}  # fmt: skip


class Plan(BaseModel):
    """The answer of the planner. `recommended` is None where nothing fits."""

    recommended: Candidate | None
    ladder: list[Candidate]
    frontier: list[Candidate]
    """No other candidate needs less memory and is faster."""
    warnings: list[str]
    assumes: str


def plan(
    spec: RunSpec,
    gpu: str,
    gpus: int = 1,
    host_memory_gib: float = 512,
    nvme_gib: float = 0,
    objective: Objective = "throughput",
) -> Plan:
    """Search configurations of a training spec on `gpus` cards, at its sequences a step.

    Raises SpecError for values that make no sense, UnsupportedError where the model has no closed form.
    """
    _check(spec, gpus, host_memory_gib, nvme_gib, objective)
    hardware = {"gpu": gpu, "world_size": gpus, "device": "auto", "memory_limit_gib": None}
    spec = RunSpec.model_validate(spec.model_dump() | hardware)
    there = limits(gpu, gpus, host_memory_gib, nvme_gib)
    ladder = _ladder(spec, there, nvme_gib > 0)
    tried = list(_search(spec, there, nvme_gib > 0))
    fitting = [candidate for candidate in [*tried, *ladder] if candidate.fits]
    best = _best(fitting, objective)
    front = pareto([(c.device_peak_bytes, c.speed) for c in fitting])
    return Plan(
        recommended=best.model_copy(update={"reason": _why(best, objective, len(fitting))}) if best else None,
        ladder=ladder,
        frontier=[fitting[index] for index in front],
        warnings=_warnings(spec, there, ladder, best),
        assumes=_assumes(gpu, gpus, there),
    )


def _check(spec: RunSpec, gpus: int, host_memory_gib: float, nvme_gib: float, objective: str) -> None:
    if spec.mode != "train":
        raise UnsupportedError("mode", "plans are for training: use mode=train")
    if spec.architecture.family != "decoder":
        raise UnsupportedError("model", f"{spec.architecture.name} ({spec.architecture.family}) has no closed form")
    if type(gpus) is not int or not 1 <= gpus <= 2**16:
        raise SpecError("gpus", f"must be an integer from 1 to {2**16}, not {gpus!r}")
    for name, value in (("host_memory_gib", host_memory_gib), ("nvme_gib", nvme_gib)):
        if not 0 <= value <= 2**24:
            raise SpecError(name, f"must be from 0 to {2**24} GiB, not {value!r}")
    if objective not in OBJECTIVES:
        raise SpecError("objective", f"{objective!r} is not known; one of {', '.join(OBJECTIVES)}")


def _best(fitting: list[Candidate], objective: Objective) -> Candidate | None:
    """Ties in speed go to the simpler configuration, which was tried first."""
    if objective == "memory":
        return min(fitting, key=lambda c: (c.device_peak_bytes, -c.speed), default=None)
    return max(fitting, key=lambda c: c.speed, default=None)


def _offloads(nvme: bool) -> Iterator[dict[str, str]]:
    yield {}
    yield {"offload_activations": "cpu"}
    yield {"offload_optimizer": "cpu"}
    yield {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
    if nvme:
        yield {"offload_optimizer": "nvme"}
        yield {"offload_optimizer": "nvme", "offload_parameters": "nvme"}


def _search(spec: RunSpec, there: Limits, nvme: bool) -> Iterator[Candidate]:
    """Candidates at their best micro-batch, simplest first."""
    shardings = ("none",) if spec.world_size == 1 else ("none", "zero-2", "zero-3")
    attention = "flash" if spec.attention == "standard" else spec.attention
    largest = spec.micro_batch * spec.grad_accumulation
    roomy: set[tuple[str, str]] = set()
    for sharding, offload, chunks, policy in product(shardings, _offloads(nvme), _loss_chunks(spec), CHECKPOINTING):
        if (sharding == "zero-2" and offload.get("offload_parameters")) or (sharding, policy) in roomy:
            continue
        changes = NEUTRAL | {"sharding": sharding, "checkpointing": policy, "attention": attention} | offload
        candidate = at_best_micro_batch(varied(spec, **changes, loss_chunks=chunks), there)
        if candidate.fits and candidate.spec.micro_batch == largest and not offload:
            roomy.add((sharding, policy))  # nothing is left that lower tiers or chunks could buy
        yield candidate


def _loss_chunks(spec: RunSpec) -> tuple[int, ...]:
    """What is asked for, and for a whole fused loss its parts too."""
    return (1, LOSS_CHUNKS) if spec.fused_loss and spec.loss_chunks == 1 else (spec.loss_chunks,)


def _rungs(spec: RunSpec, nvme: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The course's decision framework, row 15 of the notes, step by step; the loss in chunks, which costs nothing,
    comes before it."""
    yield "keep everything", {}
    for chunks in _loss_chunks(spec)[1:]:
        yield f"keep everything, the loss in {chunks} chunks", {"loss_chunks": chunks}
    yield "selective recomputation", {"checkpointing": "selective"}
    yield "recompute every layer", {"checkpointing": "per-layer"}
    yield "and the optimizer on the CPU", {"checkpointing": "per-layer", "offload_optimizer": "cpu"}
    sharded = {"checkpointing": "per-layer", "sharding": "zero-3"}
    if spec.world_size > 1:
        yield f"ZeRO-3 over {spec.world_size} GPUs", sharded
    base = sharded if spec.world_size > 1 else {"checkpointing": "per-layer"}
    both = "optimizer and parameters on the CPU"
    yield both, base | {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
    if nvme:
        yield "optimizer and parameters on NVMe", base | {"offload_optimizer": "nvme", "offload_parameters": "nvme"}


def _ladder(spec: RunSpec, there: Limits, nvme: bool) -> list[Candidate]:
    """Every rung at the spec's own micro-batch, with why it was passed over or taken."""
    rungs, taken = [], False
    for name, changes in _rungs(spec, nvme):
        candidate = judge(varied(spec, **NEUTRAL | changes), there)
        peak = format_bytes(candidate.device_peak_bytes)
        if not candidate.fits:
            reason = f"{name}: passed over, it {candidate.reason}"
        elif taken:
            reason = f"{name}: not needed, a higher rung fits"
        else:
            reason, taken = f"{name}: taken, the first that fits, with {peak} of {format_bytes(there.device)}", True
        rungs.append(candidate.model_copy(update={"reason": reason}))
    return rungs


def _why(best: Candidate, objective: Objective, count: int) -> str:
    what = "fastest" if objective == "throughput" else "smallest"
    step = f", {format_seconds(best.step_seconds)} a step" if best.step_seconds else ""
    return f"the {what} of {count} configurations that fit: {format_bytes(best.device_peak_bytes)} at the peak{step}"


def _warnings(spec: RunSpec, there: Limits, ladder: list[Candidate], best: Candidate | None) -> list[str]:
    """The course's pitfalls (rows 18 to 20), each with this plan's numbers."""
    found = []
    if best is None:
        least = min(ladder, key=lambda c: c.device_peak_bytes)
        found.append(
            f"nothing fits: the leanest rung needs {format_bytes(least.device_peak_bytes)} of "
            f"{format_bytes(there.device)} on the GPU ({format_bytes(least.host_peak_bytes)} on the host); more GPUs, "
            "more host memory, a shorter sequence or a smaller micro-batch would help"
        )
        return found
    asked = judge(spec, there)
    if asked.fits and spec.checkpointing != "none" and ladder[0].fits:
        lost = (asked.step_seconds or 0) - (ladder[0].step_seconds or 0)
        found.append(
            f"checkpointing={spec.checkpointing} is not needed: without it {format_bytes(ladder[0].device_peak_bytes)} "
            f"fit, and a step is {format_seconds(lost)} shorter"
        )
    if best.step_seconds and best.spec.offload_optimizer != "none":
        serial = judge(varied(best.spec, offload_overlap=False), there)
        lost = (serial.step_seconds or 0) - best.step_seconds
        found.append(f"offloading without overlap would cost {format_seconds(lost)} a step: keep offload_overlap=true")
    if spec.attention == "standard":
        share, half = quadratic_share(spec), half_quadratic_seq(spec)
        found.append(
            f"attention=standard keeps S×S tensors: {share:.0%} of a block's saved bytes at S={spec.seq}, half at "
            f"S={half}; the plan uses flash"
        )
    rung = next((c for c in ladder if c.fits), None)
    if rung and rung.tokens_per_second and best.tokens_per_second and best.speed > 1.02 * rung.speed:
        found.append(
            f"the ladder stops at {rung.spec.checkpointing} with {rung.tokens_per_second:,.0f} tokens/s; the "
            f"recommendation reaches {best.tokens_per_second:,.0f}"
        )
    return found


def _assumes(card: str, gpus: int, there: Limits) -> str:
    nccl = f", {format_bytes(COLLECTIVE_BYTES)} NCCL" if gpus > 1 else ""
    return (
        f"{format_bytes(there.device)} of one {find_gpu(card).name} usable (less {format_bytes(CONTEXT_BYTES)} context "
        f"and workspaces{nccl}, {FRAGMENTATION:.0%} allocator gaps); times are roofline estimates in eager mode"
    )
