"""(c) Predictions against what others measured: which rows are in scope, which spec a row is, and why the rest is out.

A row becomes one RunSpec, or two whose mean is predicted. The recipes of the sources, in our terms:

| source says                                              | our spec                                                 |
|----------------------------------------------------------|----------------------------------------------------------|
| fp32 sharded parameters, gradients, Adam; bf16 compute   | `bf16-mixed` with `zero-3`: 16 bytes a parameter over    |
|                                                          | the ranks, bf16 parameters gathered a block at a time    |
| pure bf16 parameters, gradients, optimizer states        | `bf16`                                                   |
| full, full (per layer)                                   | `per-layer`                                              |
| selective: full AC on every 2nd layer                    | mean of `none` and `per-layer` (half the layers each)    |
| per-op SAC (attention and every second matmul saved)     | mean of `selective` with and without `mlp-in`: of the    |
|                                                          | two wide matmuls one is saved; plus w2's output, less    |
|                                                          | wk's, since the rule counts matmuls and not their use    |
| reshard_after_forward=never                              | `zero-2`                                                 |
| fp32 reduce                                              | the buffer that a block's gradients are scattered from   |
|                                                          | has 4 bytes an element, 2 more than ours (torch keeps    |
|                                                          | one: `_fsdp_param_group.py`, `reduce_scatter_states`)    |
| chunked cross-entropy                                    | `loss_chunks=8`                                          |

Reserved rows of sharded runs are judged against the predicted allocated bytes times `RESERVED_OVER_ALLOCATED`, which
is taken from one source alone (`RATIO_SOURCE`, the only one that prints both); its rows are not judged by it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from engine.catalog import published_measurements
from engine.closed_form import predict
from engine.closed_form.residency import block_bytes
from engine.spec import RunSpec
from engine.units import GIB
from engine.validate.statistics import Comparison, median

Row = dict[str, Any]

RATIO_SOURCE = "commit 83c879f18 (#165)"

OUT_OF_SCOPE: tuple[tuple[str, Callable[[Row], bool]], ...] = (
    ("no memory figure", lambda row: not (row["measured_peak_gib"] or row["measured_reserved_gib"])),
    ("one layer's activations only (reproduced as formulas)", lambda row: "Korthikanti" in row["source"]
        or "single transformer layer" in row["model"] or "GPT-3 style" in row["model"]),
    ("the attention operator alone (reproduced as Table 21)", lambda row: "attention op only" in row["model"]),
    ("fp8 or int8", lambda row: bool(re.search(r"float8|fp8|int8|mxfp8|nvfp4", _text(row), re.I))),
    ("tensor, pipeline, context or expert parallelism", lambda row: _parallel(row["sharding/parallelism"] or "")),
    ("LoRA or quantised weights", lambda row: bool(re.search(r"lora|4-bit|INT8", _text(row), re.I))),
    ("a graph compiler decides what is kept", lambda row: bool(
        re.search(r"graph_trainer|SimpleFSDP", row["sharding/parallelism"] or ""))),
    ("not a language model", lambda row: "vit_" in row["model"]),
    ("batch, sequence or rank count not stated", lambda row: not (
        row["micro_batch"] and row["seq"] and row["n_gpus"])),
    ("shapes not stated", lambda row: _model(row) is None),
    ("allocated or reserved: not stated", lambda row: "reserved not stated" in (row["notes"] or "")),
    ("the optimizer runs inside backward, which Remat does not", lambda row: _in_backward(row)),
    ("a known leak was being measured", lambda row: "reference-cycle leak" in (row["sharding/parallelism"] or "")),
    ("padded batches: the tokens in them are not stated", lambda row: "unpacked rows pad" in (row["notes"] or "")
        and "packed dataset" not in (row["notes"] or "")),
    ("techniques Remat has not (Liger's or DeepSpeed's own tiling)", lambda row: "ArcticTraining" in row["source"]),
    ("checkpointing, optimizer or precision not stated", lambda row: row["checkpointing"] is None
        or (row["optimizer"] is None and "quantized_training" not in row["source"])),
)  # fmt: skip
"""Reasons in the order they are tried; the first that holds is the one that is reported."""


def _text(row: Row) -> str:
    return f"{row['model']} {row['sharding/parallelism']} {row['optimizer']} {row['dtype']}"


def _parallel(text: str) -> bool:
    degrees = re.findall(r"\b(?:TP|PP|CP|EP)[ =]?(\d+)|(\d+)-way TP|(?:TP|PP|CP|EP) (\d+)", text)
    return any(int(number) > 1 for match in degrees for number in match if number)


def reason_out(row: Row) -> str | None:
    """Why a row is not judged; None if it is."""
    return next((reason for reason, holds in OUT_OF_SCOPE if holds(row)), None)


@dataclass(frozen=True, slots=True)
class Judged:
    """A row in scope."""

    index: int
    row: Row
    specs: list[RunSpec]
    compiled: bool

    @property
    def label(self) -> str:
        row = self.row
        source = re.sub(r"^github ", "", row["source"])[:60]
        return f"{source}: {row['model']} b{row['micro_batch']} s{row['seq']}, {row['sharding/parallelism'][:48]}"


@cache
def rows_in_scope() -> tuple[Judged, ...]:
    rows = enumerate(published_measurements())
    return tuple(
        Judged(index, row, specs_of(row), "compile" in (row["sharding/parallelism"] or "") + (row["notes"] or ""))
        for index, row in rows
        if reason_out(row) is None
    )


def specs_of(row: Row) -> list[RunSpec]:
    """The spec, or the two whose mean is predicted, of a row in scope."""
    base = {
        "model": _model(row),
        "micro_batch": row["micro_batch"],
        "seq": row["seq"],
        "precision": "bf16" if "pure bf16" in (row["master_weights/precision recipe"] or "pure bf16") else "bf16-mixed",
        "optimizer": "adamw-8bit" if "8bit" in (row["optimizer"] or "").replace("-", "") else "adamw",
        "loss_chunks": 8 if re.search(r"chunked C", _described(row)) else 1,
        "offload_activations": "cpu" if "activations" in (row["offload"] or "") else "none",
        "gpu": "h100",
    } | _sharding(row)
    return [RunSpec.model_validate(base | {"checkpointing": name}) for name in _policies(row["checkpointing"])]


def _described(row: Row) -> str:
    return f"{row['sharding/parallelism']} {row['notes']}"


PRESETS = {"Qwen3-32B": "qwen3-32b", "Llama-7B": "llama-7b"}
"""Models that a source names without printing every shape."""


def _model(row: Row) -> str | None:
    for prefix, preset in PRESETS.items():
        if row["model"].startswith(prefix):
            return preset
    shape = [row[key] for key in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")]
    return None if None in shape else f"llama:{','.join(map(str, shape))}"


def _in_backward(row: Row) -> bool:
    return bool(re.search(r"opt(imizer)?[ -]in[ -]b(ack)?w", row["notes"] or "", re.I))


def _sharding(row: Row) -> dict[str, Any]:
    text = row["sharding/parallelism"]
    if row["n_gpus"] == 1:
        return {}
    stage = "zero-2" if "never (ZeRO-2)" in text else "zero-3" if "FSDP" in text else "none"
    if match := re.search(r"ZeRO-([01])", text):
        stage = "zero-1" if match[1] == "1" else "none"
    return {"sharding": stage, "world_size": row["n_gpus"]}


SAC = ("norms+attention-out+mlp-activation", "norms+attention-out+mlp-activation+mlp-in")


def _policies(name: str) -> list[str]:
    if name == "none":
        return ["none"]
    if "every 2nd layer" in name:
        return ["none", "per-layer"]
    if name.startswith("full"):
        return ["per-layer"]
    return [f"selective:{groups}" for groups in SAC]


def predicted_bytes(judged: Judged) -> float:
    """Allocated bytes at the peak: the mean over the row's specs, and what the source's recipe holds besides."""
    peaks = [predict(spec).memory.device_peak_bytes or 0 for spec in judged.specs]
    spec = judged.specs[0]
    logits = 4 * spec.micro_batch * spec.seq * spec.architecture.vocab
    held = logits if judged.row["source"].endswith(HELD_LOGITS) else 0
    if "per-op" in judged.row["checkpointing"]:
        held += _saved_by_every_second_matmul(spec)
    if "fp32 reduce" in (judged.row["master_weights/precision recipe"] or "") and spec.sharding == "zero-3":
        held += block_bytes(spec.architecture, "bf16")
    return sum(peaks) / len(peaks) + held


def _saved_by_every_second_matmul(spec: RunSpec) -> int:
    """What per-op SAC keeps beyond our two specs' mean: of wq, wk, wv, wo, w1, w3, w2 in that order it saves the first,
    third, fifth and seventh, so w2's output (which backward never reads) and not wk's."""
    arch = spec.architecture
    return 2 * arch.layers * spec.micro_batch * spec.seq * (arch.hidden - arch.kv_width)


HELD_LOGITS = ("(#165)", "(#355)")
"""Sources from before torchtitan #391 (2024-06-12, "del logits to save 3.9G memory"): until then its training loop
held the fp32 logits, 4·B·S·V bytes, through backward."""


@cache
def reserved_over_allocated() -> float:
    """The median ratio in the one source that prints both, on runs without tensor parallelism."""
    pairs = [
        row["measured_reserved_gib"] / row["measured_peak_gib"]
        for row in published_measurements()
        if RATIO_SOURCE in row["source"] and row["measured_peak_gib"] and not _parallel(row["sharding/parallelism"])
    ]
    return median(pairs)


def compare() -> Iterator[Comparison]:
    """Every judged figure of every row in scope, in bytes."""
    for judged in rows_in_scope():
        allocated = predicted_bytes(judged)
        kind = "compiled" if judged.compiled else "eager"
        if judged.row["measured_peak_gib"]:
            actual = judged.row["measured_peak_gib"] * GIB
            yield Comparison(judged.label, f"allocated, {kind}", allocated, actual, judged.index)
        if judged.row["measured_reserved_gib"] and RATIO_SOURCE not in judged.row["source"]:
            actual = judged.row["measured_reserved_gib"] * GIB
            reserved = allocated * reserved_over_allocated()
            yield Comparison(judged.label, f"reserved, {kind}", reserved, actual, judged.index)


def counts_out() -> dict[str, int]:
    """How many rows are out of scope, by reason."""
    reasons = [reason_out(row) for row in published_measurements()]
    return {reason: reasons.count(reason) for reason, _ in OUT_OF_SCOPE if reason in reasons}


UNSAID = {
    164: "the optimizer step inside backward frees each gradient at once; not in the printed configuration",
    433: "the same printed configuration as a row at 47.65 GiB: versions and settings differ, unstated",
    437: "the same printed configuration as a row at 47.65 GiB: versions and settings differ, unstated",
    92: "lower than the same batch without torch.compile: what the compiler recomputes is not stated",
}
"""What the source of an outlier leaves unsaid, by row."""
