"""(c) Predictions against what others measured: which rows are in scope, which spec a row is, and why the rest is out.

A row becomes one RunSpec, or two whose mean is predicted. The recipes of the sources, in our terms:

| source says                                              | our spec                                                 |
|----------------------------------------------------------|----------------------------------------------------------|
| fp32 sharded parameters, gradients, Adam; bf16 compute   | `bf16-mixed` with `zero-3`, its shards as FSDP2's mixed  |
|                                                          | precision has them (`engine.validate.trainers`)          |
| pure bf16 parameters, gradients, optimizer states        | `bf16`                                                   |
| full, full (per layer)                                   | `per-layer`                                              |
| selective: full AC on every 2nd layer                    | mean of `none` and `per-layer` (half the layers each)    |
| per-op SAC (attention and every second matmul saved)     | mean of `selective` with and without `mlp-in`: of the    |
|                                                          | two wide matmuls one is saved; plus w2's output, less    |
|                                                          | wk's, since the rule counts matmuls and not their use    |
| reshard_after_forward=never                              | `zero-3` whose blocks all stay whole after forward       |
| cross-entropy of fp32 logits                             | `loss=standard`; chunked: `loss_chunks=8`                |

What their training codes keep besides, each with its source, is in `engine.validate.trainers`; nothing of it is fitted.

Reserved peaks: what is alive outside the side streams' pools, times `reserved_over_main`, plus what those pools keep.
The factor is fitted to one source alone (`RATIO_SOURCE`, the only one that prints allocated and reserved), whose
rows are not judged by it. It is that source's 90th percentile rather than its median, since a prediction that is too
low ends in an out-of-memory error and one that is too high in a smaller batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from textwrap import shorten
from typing import Any

from engine.catalog import published_measurements
from engine.closed_form.training import walk_step
from engine.spec import RunSpec
from engine.units import GIB
from engine.validate.statistics import Comparison, quantile
from engine.validate.trainers import Row, Trainer, kept_besides, trainer_of

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
    def trainer(self) -> Trainer:
        return trainer_of(self.row)

    @property
    def label(self) -> str:
        return label_of(self.row)


def label_of(row: Row) -> str:
    """A row in a line, shortened between words."""
    source = shorten(re.sub(r"^github ", "", row["source"]), 72, placeholder=" …")
    how = shorten(row["sharding/parallelism"], 80, placeholder=" …")
    return f"{source}: {row['model']} b{row['micro_batch']} s{row['seq']}, {how}"


@cache
def rows_in_scope() -> tuple[Judged, ...]:
    rows = enumerate(published_measurements())
    return tuple(Judged(index, row, specs_of(row), is_compiled(row)) for index, row in rows if reason_out(row) is None)


def is_compiled(row: Row) -> bool:
    """Whether a row was measured under torch.compile."""
    return "compile" in _described(row)


def specs_of(row: Row) -> list[RunSpec]:
    """The spec, or the two whose mean is predicted, of a row in scope."""
    chunked = re.search(r"chunked C", _described(row))
    base = {
        "model": _model(row),
        "micro_batch": row["micro_batch"],
        "seq": row["seq"],
        "precision": "bf16" if "pure bf16" in (row["master_weights/precision recipe"] or "pure bf16") else "bf16-mixed",
        "optimizer": "adamw-8bit" if "8bit" in (row["optimizer"] or "").replace("-", "") else "adamw",
        "loss_chunks": 8 if chunked else 1,
        "loss": "fused" if chunked or (is_compiled(row) and trainer_of(row).compiled_loss) else "standard",
        "offload_activations": "cpu" if "activations" in (row["offload"] or "") else "none",
        "gpu": "h100",
    } | _sharding(row)
    return [RunSpec.model_validate(base | {"checkpointing": name}) for name in _policies(row["checkpointing"])]


def _described(row: Row) -> str:
    return f"{row['sharding/parallelism']} {row['notes']}"


LLAMA_3_2_3B = {
    "model_type": "llama", "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24,
    "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True,
}  # fmt: skip
"""Its embedding is its head, which the shapes of a row do not say."""

PRESETS: dict[str, str | dict[str, Any]] = {
    "Qwen3-32B": "qwen3-32b",
    "Llama-7B": "llama-7b",
    "Llama-3.2-3B": LLAMA_3_2_3B,
}
"""Models that a source names without printing every shape."""


def _model(row: Row) -> str | dict[str, Any] | None:
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
    stage = "zero-3" if "FSDP" in text else "none"
    if match := re.search(r"ZeRO-([01])", text):
        stage = "zero-1" if match[1] == "1" else "none"
    return {"sharding": stage, "world_size": row["n_gpus"]}


SAC = ["selective:norms+attention-out+mlp-activation", "selective:norms+attention-out+mlp-activation+mlp-in"]


def _policies(name: str) -> list[str]:
    if name == "none":
        return ["none"]
    if "every 2nd layer" in name:
        return ["none", "per-layer"]
    if name.startswith("full"):
        return ["per-layer"]
    return SAC


@dataclass(frozen=True, slots=True)
class Predicted:
    """Bytes of one row."""

    allocated: float
    main: float
    """The most that is alive outside the side streams' pools."""
    side_pools: float


@cache
def _predicted(index: int) -> Predicted:
    judged = next(judged for judged in rows_in_scope() if judged.index == index)
    return _mean([_walked(judged, spec) for spec in judged.specs])


def predicted(judged: Judged) -> Predicted:
    """The mean over the row's specs, with what its trainer keeps besides."""
    return _predicted(judged.index)


def _walked(judged: Judged, spec: RunSpec) -> Predicted:
    trainer = judged.trainer
    logits = spec.micro_batch * spec.seq * spec.architecture.vocab
    step = walk_step(spec, trainer.fsdp, waiting=trainer.chunk_logit_bytes * logits if spec.loss_chunks > 1 else 0)
    besides = kept_besides(trainer, spec, compiled=judged.compiled)
    if spec.checkpointing in SAC:
        besides += _saved_by_every_second_matmul(spec)
    return Predicted(step.meter.peak + besides, step.meter.main_peak + besides, step.side_pools_bytes)


def _mean(parts: list[Predicted]) -> Predicted:
    count = len(parts)
    return Predicted(
        sum(part.allocated for part in parts) / count,
        sum(part.main for part in parts) / count,
        sum(part.side_pools for part in parts) / count,
    )


def _saved_by_every_second_matmul(spec: RunSpec) -> int:
    """What per-op SAC keeps beyond our two specs' mean: of wq, wk, wv, wo, w1, w3, w2 in that order it saves the first,
    third, fifth and seventh (torchtitan `_get_custom_policy`), so w2's output, which backward never reads, and not
    wk's."""
    arch = spec.architecture
    return 2 * arch.layers * spec.micro_batch * spec.seq * (arch.hidden - arch.kv_width)


@cache
def reserved_over_main(*, compiled: bool) -> float:
    """Of `RATIO_SOURCE`'s FSDP2 runs, eager or compiled: the 90th percentile of what is reserved, less the side
    streams' pools, over what is alive outside them. FSDP1's pools are others and not modelled."""
    ratios = []
    for judged in rows_in_scope():
        row = judged.row
        if RATIO_SOURCE in row["source"] and judged.compiled == compiled and "FSDP2" in row["sharding/parallelism"]:
            peak = predicted(judged)
            ratios.append((row["measured_reserved_gib"] * GIB - peak.side_pools) / peak.main)
    return quantile(ratios, 0.9)


def compare() -> Iterator[Comparison]:
    """Every judged figure of every row in scope, in bytes."""
    for judged in rows_in_scope():
        peak = predicted(judged)
        kind = "compiled" if judged.compiled else "eager"
        if judged.row["measured_peak_gib"]:
            actual = judged.row["measured_peak_gib"] * GIB
            yield Comparison(judged.label, f"allocated, {kind}", peak.allocated, actual, judged.index)
        if judged.row["measured_reserved_gib"] and RATIO_SOURCE not in judged.row["source"]:
            actual = judged.row["measured_reserved_gib"] * GIB
            reserved = peak.main * reserved_over_main(compiled=judged.compiled) + peak.side_pools
            yield Comparison(judged.label, f"reserved, {kind}", reserved, actual, judged.index)


def counts_out() -> dict[str, int]:
    """How many rows are out of scope, by reason."""
    reasons = [reason_out(row) for row in published_measurements()]
    return {reason: reasons.count(reason) for reason, _ in OUT_OF_SCOPE if reason in reasons}


UNSAID = {
    50: "whether it or its loss was compiled is not printed: with an eager loss, 47.4 GiB are predicted",
    437: "measured 5.4 GiB below the same printed configuration on MI300X of four days before; the source does not "
    "say why",
}
"""What the source of a row leaves unsaid, by row: of every outlier, and of every one predicted too low."""
