"""(b) Closed form against simulation over the catalog, and which configs cannot be simulated and why."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine.architecture import Architecture, from_config
from engine.catalog import model_configs
from engine.closed_form import predict
from engine.errors import RematError
from engine.simulate import simulate
from engine.spec import RunSpec
from engine.validate.statistics import Comparison

POLICIES = ("none", "per-layer", "every-4", "selective")
THEIR_CLASS = "transformers' class"
SHAPE = {"micro_batch": 8, "seq": 1024, "precision": "bf16", "optimizer": "sgd"}
"""Enough tokens, and small enough states, that activations are what is compared."""


def _claimed(arch: Architecture) -> bool:
    """Dense decoders that our own decoder runs: the closed form claims them to the byte."""
    return arch.style != "other" and arch.family == "decoder"


def compare() -> Iterator[Comparison]:
    """Peaks of our decoder where it runs the model, and of transformers' class for every decoder of the catalog."""
    for name, config in model_configs().items():
        arch = from_config(config, name)
        if arch.family != "decoder":
            continue
        for policy in POLICIES if _claimed(arch) else ():
            spec = RunSpec.model_validate({"model": name, "checkpointing": policy, **SHAPE})
            yield _pair(f"{name} {policy}", "our decoder", spec, spec)
        for policy in ("none", "per-layer"):
            theirs = RunSpec.model_validate({"model": config, "checkpointing": policy, **SHAPE})
            ours = RunSpec.model_validate({"model": name, "checkpointing": policy, **SHAPE})
            yield _pair(f"{name} {policy}", THEIR_CLASS, ours, theirs)


def _pair(label: str, group: str, predicted: RunSpec, actual: RunSpec) -> Comparison:
    closed, simulated = predict(predicted), simulate(actual)[0]
    return Comparison(label, group, closed.memory.device_peak_bytes or 0, simulated.memory.device_peak_bytes or 1)


@dataclass(frozen=True, slots=True)
class ConfigCheck:
    """One config of the catalog, simulated by its transformers class."""

    name: str
    seconds: float
    parameters: int | None
    architecture_parameters: int | None
    stated_parameters: int | None
    reason: str | None
    """Why it was refused, if it was."""


def check_configs() -> Iterator[ConfigCheck]:
    """Every config as a user would hand it in: `--method simulated --micro-batch 1 --seq 2048`."""
    for name, config in model_configs().items():
        start = time.perf_counter()
        parameters, counted, reason = None, None, None
        try:
            spec = RunSpec.model_validate({"model": config, "micro_batch": 1, "seq": _sequence(config)})
            counted = spec.architecture.parameters
            parameters = simulate(spec)[0].parameters
        except (RematError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
        yield ConfigCheck(
            name, time.perf_counter() - start, parameters, counted, config.get("_true_param_count"), reason
        )


def _sequence(config: dict[str, Any]) -> int:
    """2048 tokens, or as many as the model has positions."""
    limits = [config.get(key) for key in ("n_positions", "max_position_embeddings", "max_seq_len")]
    return min(2048, *(limit for limit in limits if isinstance(limit, int)), 2**20)
