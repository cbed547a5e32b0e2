"""(a) Simulated against measured `device_peak_bytes` on this machine, over a fixed grid of small specs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from engine.measure import measure
from engine.simulate import simulate
from engine.spec import RunSpec
from engine.validate.statistics import Comparison

WIDTHS: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 2048,
}  # fmt: skip

TRANSFORMERS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **WIDTHS},
    "gpt2": {"model_type": "gpt2", "n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 2048, "n_positions": 512},
    "qwen3": {"model_type": "qwen3", **WIDTHS},
    "gemma2": {"model_type": "gemma2", **WIDTHS},
    "mixtral": {"model_type": "mixtral", **WIDTHS, "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Small models of five families, run by their transformers classes."""

DECODERS = ("gpt:4,128,4,2048", "llama:4,128,4,2,352,2048")
POLICIES = ("none", "per-layer", "every-2", "selective", "nested")
EXTRAS: tuple[dict[str, Any], ...] = (
    {"optimizer": "sgd"}, {"optimizer": "adamw-8bit"}, {"loss_chunks": 4}, {"grad_accumulation": 2},
    {"offload_activations": "cpu"}, {"offload_optimizer": "cpu"},
)  # fmt: skip
SHARDED: tuple[dict[str, Any], ...] = (
    {"sharding": "zero-1", "grad_accumulation": 2}, {"sharding": "zero-2", "checkpointing": "per-layer"},
    {"sharding": "zero-3", "checkpointing": "per-layer"}, {"sharding": "zero-3", "precision": "fp32"},
)  # fmt: skip
"""Over two processes."""
SHAPES = ((1, 128), (3, 256))


def grid() -> list[RunSpec]:
    """The specs, always the same ones: 74 of them."""
    shapes = itertools.cycle(SHAPES)
    points: list[dict[str, Any]] = []
    for model, policy, attention in itertools.product(DECODERS, POLICIES, ("flash", "standard", "tiled")):
        points.append({"model": model, "checkpointing": policy, "attention": attention})
    for model, precision in itertools.product(DECODERS, ("bf16", "bf16-12", "fp32", "bf16-autocast")):
        points.append({"model": model, "precision": precision})
    for model, extra in itertools.product(DECODERS, EXTRAS):
        points.append({"model": model, **extra})
    for name, policy in itertools.product(TRANSFORMERS, ("none", "per-layer", "selective")):
        points.append({"model": TRANSFORMERS[name], "checkpointing": policy})
    for model, sharded in itertools.product(DECODERS, SHARDED):
        points.append({"model": model, "world_size": 2, **sharded})
    points.append({"model": DECODERS[0], "dropout": 0.1, "attention": "standard"})
    return [
        RunSpec.model_validate({"device": "cpu", "steps": 1, "warmup": 1, "micro_batch": b, "seq": s} | point)
        for point, (b, s) in zip(points, shapes, strict=False)
    ]


def label(spec: RunSpec) -> str:
    """One line for a table: the model and what differs from the defaults."""
    model = spec.model if isinstance(spec.model, str) else f"transformers {spec.model['model_type']}"
    plain = RunSpec(device="cpu", steps=1, warmup=1).model_dump()
    fields = {key: value for key, value in spec.model_dump().items() if key != "model" and value != plain[key]}
    return " ".join([model, *(f"{key}={value}" for key, value in fields.items())])


def compare() -> Iterator[Comparison]:
    for spec in grid():
        measured, simulated = measure(spec)[0], simulate(spec)[0]
        actual, predicted = measured.memory.device_peak_bytes, simulated.memory.device_peak_bytes
        if actual is None or predicted is None:
            raise RuntimeError(f"{label(spec)}: no peak ({measured.outcome}: {measured.error})")
        group = "our decoder" if isinstance(spec.model, str) else "transformers"
        yield Comparison(label(spec), group, predicted, actual)
