"""Facts with sources: GPUs, models, published measurements. Data files and their loader; torch-free."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from engine.errors import SpecError

DATA = files("engine.catalog") / "data"

# Short names people use, beside the slug of the catalog's own name.
GPU_ALIASES = {
    "a100-80gb": "a100-80gb-sxm",
    "a100": "a100-80gb-sxm",
    "h100": "h100-sxm",
    "h200": "h200-sxm",
    "b200": "b200-sxm",
    "v100": "v100-sxm2-32gb",
    "v100-32gb": "v100-sxm2-32gb",
    "gh200": "gh200-96gb",
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card. Rates are data-sheet peaks, dense; None where no source was found."""

    slug: str
    name: str
    memory_bytes: int
    memory_bytes_per_second: float
    bf16_flops_per_second: float | None
    fp16_flops_per_second: float | None
    host_link: str | None
    host_link_bytes_per_second: float | None
    """Per direction, theoretical."""
    measured_host_link_bytes_per_second: float | None
    measured_matmul_flops_per_second: float | None
    device_names: tuple[str, ...]
    source: dict[str, str]
    notes: str | None


def _times(value: float | dict[str, Any] | None, unit: float) -> float | None:
    """A bare number, or {"value", "source"}, in base units."""
    number = value["value"] if isinstance(value, dict) else value
    return None if number is None else number * unit


def _slower_direction(measured: dict[str, Any] | None) -> float | None:
    """{"h2d", "d2h"} in GB/s, one direction at a time -> the slower one in bytes per second."""
    return None if measured is None else min(measured["h2d"], measured["d2h"]) * 1e9


@cache
def gpus() -> dict[str, Gpu]:
    """Every card of the catalog by slug."""
    rows = json.loads((DATA / "gpus.json").read_text())["gpus"]
    cards = [
        Gpu(
            slug=row["name"].lower().replace(" ", "-"),
            name=row["name"],
            memory_bytes=int(row["memory_gib"] * 2**30),
            memory_bytes_per_second=row["memory_bandwidth_gbs"] * 1e9,
            bf16_flops_per_second=_times(row["bf16_dense_tflops"], 1e12),
            fp16_flops_per_second=_times(row["fp16_dense_tflops"], 1e12),
            host_link=row["host_link"],
            host_link_bytes_per_second=_times(row["host_link_gbs"], 1e9),
            measured_host_link_bytes_per_second=_slower_direction(row["host_link_measured_gbs"]),
            measured_matmul_flops_per_second=_times(row["bf16_measured_matmul_tflops"], 1e12),
            device_names=tuple(row["match"]),
            source=row["source"],
            notes=row["notes"],
        )
        for row in rows
    ]
    return {card.slug: card for card in cards}


def gpu(name: str) -> Gpu:
    """The card of that slug or alias. Raises SpecError with the accepted names."""
    slug = name.strip().lower()
    card = gpus().get(GPU_ALIASES.get(slug, slug))
    if card is None:
        raise SpecError("gpu", f"unknown GPU {name[:80]!r}; one of {', '.join(gpus())}")
    return card


def gpu_of_device(device_name: str) -> Gpu | None:
    """The card that a driver reports under that name; None where the catalog has it not (never a near miss)."""
    if "Laptop" in device_name:
        return None
    matches = (card for card in gpus().values() for name in card.device_names if _names(name, device_name))
    return next(matches, None)


def _names(name: str, device_name: str) -> bool:
    """As a whole word: "A10" is a prefix of "A10G" and of "A100"."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", device_name) is not None


@cache
def model_configs() -> dict[str, dict[str, Any]]:
    """Every catalog model's Hugging Face config by preset name; keys starting with `_` are provenance."""
    folder = DATA / "configs"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".json"))
    return {name.removesuffix(".json"): json.loads((folder / name).read_text()) for name in names}


@cache
def published_measurements() -> tuple[dict[str, Any], ...]:
    """Peak memory and throughput that others measured, each row with its source."""
    return tuple(json.loads(line) for line in (DATA / "published.jsonl").read_text().splitlines())
