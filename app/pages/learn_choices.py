"""What the Learn pages on choices draw: selective recomputation, the link, the pitfalls, the ladder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.pages.figures import stacked
from app.pages.form import query_of
from app.pages.learn_figures import BATCH, SEQ, at_peak, gpu_input, model_input
from engine.catalog import gpu
from engine.checkpoint_names import OP_GROUPS
from engine.closed_form import predict
from engine.closed_form.fits import usable_bytes
from engine.closed_form.hardware import rates
from engine.closed_form.pitfalls import half_quadratic_seq, quadratic_share
from engine.closed_form.timing import transfers
from engine.exercises.exercise import Bar, Bars, Input, build_spec, peak_bytes
from engine.exercises.selective import cost, groups_of
from engine.exercises.shapes import shape_inputs
from engine.planning import Candidate, plan
from engine.result import RunResult
from engine.spec import RunSpec
from engine.units import format_seconds

Inputs = Mapping[str, Any]

SELECTIVE_INPUTS = (
    *shape_inputs(layers=24, hidden=2048, heads=16, vocab=50_257, batch=4, seq=2048),
    Input("dropout", "Dropout", 0.1, "", "p", 0, 0.9),
    Input("attention", "Attention", "standard", choices=("standard", "flash")),
)


def selective(inputs: Inputs) -> dict[str, Any]:
    """What each op group saves and costs when only it is recomputed, best ratio first."""
    alone = sorted((cost(inputs, (group,)) for group in groups_of(inputs)), key=lambda c: -c.saved_bytes)
    ranked = sorted(alone, key=lambda c: c.saved_bytes / max(c.overhead_fraction, 1e-9), reverse=True)
    return {
        "bars": stacked(
            Bars(
                "Memory saved by recomputing one group",
                "B",
                tuple(Bar(c.name, (("Saved", c.saved_bytes),)) for c in alone),
            )
        ),
        "groups": [(c, OP_GROUPS[c.name]) for c in ranked],
        "exercise": {name: inputs[name] for name in inputs},
    }


OFFLOAD_INPUTS = (
    model_input("llama-2-7b"),
    gpu_input("h100-sxm"),
    Input("batch", "Micro-batch", 1, "", "B", 1, 4096),
    Input("seq", "Sequence length", 4096, "", "S", 1, 1_048_576),
    Input("precision", "Precision", "bf16-mixed", choices=("bf16-mixed", "bf16-12")),
)


@dataclass(frozen=True, slots=True)
class Lane:
    """One worker of a timeline; pieces are (what, fill, start, width) in percent of the longer timeline."""

    name: str
    pieces: list[tuple[str, str, float, float]]


LINKS = {"down": ("gradients down", 2), "cpu": ("CPU update", 4), "up": ("weights up", 6)}
"""Link of a transfer -> its lane and fill."""


def offload(inputs: Inputs) -> dict[str, Any]:
    """A step with the optimizer on the CPU: lanes of compute and of transfers, serial and overlapped."""
    specs = {kind: _offloaded(inputs, kind == "overlapped") for kind in ("serial", "overlapped")}
    results = {kind: predict(spec) for kind, spec in specs.items()}
    resident = predict(specs["overlapped"].model_copy(update={"offload_optimizer": "none"}))
    longest = max(step_seconds(result) for result in results.values())
    return {
        "timelines": {kind: _lanes(specs[kind], result, longest) for kind, result in results.items()},
        "seconds": {kind: step_seconds(result) for kind, result in results.items()},
        "exposed": {kind: result.timing.phases_seconds.exposed_transfer or 0.0 for kind, result in results.items()},
        "resident_seconds": step_seconds(resident),
        "resident_peak": peak_bytes(resident),
        "offloaded_peak": peak_bytes(results["overlapped"]),
        "host_bytes": results["overlapped"].memory.host_peak_bytes,
        "card": gpu(inputs["gpu"]),
        "verify": query_of(
            {"model": "gpt:8,512,8", "precision": "fp32", "device": "cpu", "seq": 256},
            {"offload_optimizer": ["none", "cpu"], "offload_overlap": [True, False]},
        ),
    }


def _offloaded(inputs: Inputs, overlap: bool) -> RunSpec:
    return build_spec(
        model=inputs["model"],
        gpu=inputs["gpu"],
        micro_batch=inputs["batch"],
        seq=inputs["seq"],
        precision=inputs["precision"],
        checkpointing="per-layer",
        offload_optimizer="cpu",
        offload_overlap=overlap,
    )


def _lanes(spec: RunSpec, result: RunResult, longest: float) -> list[Lane]:
    """Compute in order; each transfer beside backward when they overlap, otherwise one after the other behind it."""
    phases, rate = result.timing.phases_seconds, rates(gpu(spec.gpu or ""), 1)
    forward, backward = phases.forward or 0.0, phases.backward or 0.0

    def piece(what: str, fill: int, start: float, seconds: float) -> tuple[str, str, float, float]:
        share = 100 / longest
        return (
            f"{what}: {format_seconds(seconds)}",
            f"fill-part-{fill}",
            round(start * share, 3),
            round(seconds * share, 3),
        )

    lanes = [Lane("GPU", [piece("forward", 1, 0, forward), piece("backward", 3, forward, backward)])]
    at = forward if spec.offload_overlap else forward + backward
    for _, link, seconds in transfers(spec, rate, 0) if rate else ():
        name, fill = LINKS[link]
        lanes.append(Lane(name, [piece(name, fill, at, seconds)]))
        at += 0 if spec.offload_overlap else seconds
    return lanes


def fits(result: RunResult) -> bool:
    """By the product's own rule: the card's memory less context and gaps."""
    return result.fits is not None and result.fits.fits


def step_seconds(result: RunResult) -> float:
    assert result.timing.step_seconds is not None
    return result.timing.step_seconds


PITFALL_INPUTS = (model_input("llama-3.2-1b"), gpu_input(), BATCH, SEQ)


def pitfalls(inputs: Inputs) -> dict[str, Any]:
    """The price of each mistake for this model: checkpointing unasked, a serial link, S×S at length S."""
    card = gpu(inputs["gpu"])
    policies = {name: predict(_spec(inputs, checkpointing=name)) for name in ("none", "selective", "per-layer")}
    gentlest = next((name for name, result in policies.items() if fits(result)), None)
    serial, overlapped = (
        predict(_spec(inputs, checkpointing="per-layer", offload_optimizer="cpu", offload_overlap=overlap))
        for overlap in (False, True)
    )
    lengths = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
    share = {seq: quadratic_share(_spec(inputs, attention="standard", seq=seq)) for seq in lengths}
    return {
        "card": card,
        "policies": stacked(
            Bars(
                "Does it already fit?", "B",
                tuple(at_peak(name, result) for name, result in policies.items()),
                ((f"usable on {card.name}", usable_bytes(card)),),
            )
        ),
        "gentlest": gentlest,
        "wasted_fraction": step_seconds(policies["per-layer"]) / step_seconds(policies[gentlest or "per-layer"]) - 1,
        "serial_seconds": step_seconds(serial),
        "overlapped_seconds": step_seconds(overlapped),
        "shares": stacked(
            Bars(
                "Share of a block's saved bytes that the S×S tensors take, standard attention", "fraction",
                tuple(Bar(f"S = {seq:,}", (("S×S tensors", value),)) for seq, value in share.items()),
                (("half", 0.5),),
            )
        ),
        "half": half_quadratic_seq(_spec(inputs, attention="standard")),
    }  # fmt: skip


def _spec(inputs: Inputs, **changes: Any) -> RunSpec:
    fields = {"model": inputs["model"], "gpu": inputs["gpu"], "micro_batch": inputs["batch"], "seq": inputs["seq"]}
    return build_spec(**(fields | changes))


LADDER_INPUTS = (
    model_input("llama-2-7b"),
    gpu_input(),
    Input("gpus", "GPUs", 1, "", "", 1, 4096),
    Input("host_gib", "Host memory, GiB", 512, "", "", 0, 65_536),
    Input("batch", "Micro-batch", 2, "", "B", 1, 4096),
    SEQ,
)


def ladder(inputs: Inputs) -> dict[str, Any]:
    """The planner's answer: every rung of the course's ladder, and the fastest configuration that fits."""
    spec = build_spec(model=inputs["model"], micro_batch=inputs["batch"], seq=inputs["seq"])
    found = plan(spec, inputs["gpu"], gpus=inputs["gpus"], host_memory_gib=inputs["host_gib"])
    card = gpu(inputs["gpu"])
    rungs = [Rung(candidate, *_words(candidate.reason)) for candidate in found.ladder]
    return {
        "card": card,
        "rungs": rungs,
        "recommended": found.recommended,
        "recommended_query": query_of(found.recommended.spec.model_dump()) if found.recommended else {},
        "tried": dict(_differs(found.recommended)),
        "warnings": found.warnings,
        "assumes": found.assumes,
        "bars": stacked(
            Bars(
                "Predicted peak of each rung",
                "B",
                tuple(at_peak(rung.title, predict(rung.candidate.spec)) for rung in rungs),
                ((f"usable on {card.name}", usable_bytes(card, inputs["gpus"])),),
            )
        ),
    }


@dataclass(frozen=True, slots=True)
class Rung:
    candidate: Candidate
    title: str
    reason: str

    @property
    def taken(self) -> bool:
        return self.reason.startswith("taken")

    @property
    def query(self) -> dict[str, Any]:
        return query_of(self.candidate.spec.model_dump())


def _words(reason: str) -> tuple[str, str]:
    """`keep everything: passed over, …` to a title and its reason."""
    title, _, why = reason.partition(": ")
    return title[:1].upper() + title[1:], why


def _differs(candidate: Candidate | None) -> Iterator[tuple[str, Any]]:
    """What the recommended configuration sets, as a person would type it."""
    shown = ("checkpointing", "attention", "micro_batch", "grad_accumulation", "sharding")
    for name in (*shown, "offload_optimizer", "offload_parameters", "offload_activations"):
        value = getattr(candidate.spec, name) if candidate else "none"
        if value != "none":
            yield name.replace("_", " "), value
