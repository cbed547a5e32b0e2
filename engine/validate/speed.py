"""(d) Predicted tokens a second against those that others measured: the rows of (c)'s scope that print a throughput,
with or without a memory figure.

Sources that an efficiency of `engine.closed_form.hardware` was taken from are not judged (`FITTED`). Cards that the
catalog has not are left out; Meta's H100 (96 GB of HBM2e, 500 W) is predicted as an H100 SXM, in groups of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.catalog import published_measurements
from engine.closed_form import predict
from engine.validate.published import OUT_OF_SCOPE, is_compiled, label_of, specs_of
from engine.validate.statistics import Comparison
from engine.validate.trainers import Row

FITTED = ("fms-fsdp", "ao docs/source/workflows/training.md")
"""Sources of PRODUCT_EFFICIENCY: their rows would judge themselves."""

OF_MEMORY_ALONE = {"no memory figure", "allocated or reserved: not stated"}
"""Reasons that keep a row from being judged in memory, not in speed."""

CARDS = (
    ("96GB HBM2e", "H100 at 500 W", "h100-sxm"),
    ("H100 ~95GiB", "H100 at 500 W", "h100-sxm"),
    ("H100 94.99GiB", "H100 at 500 W", "h100-sxm"),
    ("h100", "H100", "h100-sxm"),
    ("a100_40gb", "A100", "a100-40gb"),
    ("a100", "A100", "a100-80gb-sxm"),
)
"""(part of what a source calls the card, its group, its slug in the catalog), the first that fits."""


def compare() -> Iterator[Comparison]:
    """Every judged throughput, in tokens a second and GPU."""
    for index, row in enumerate(published_measurements()):
        card = _card(row)
        if card is None or not _in_scope(row):
            continue
        group, slug = card
        timings = [predict(spec.model_copy(update={"gpu": slug})).timing for spec in specs_of(row)]
        seconds = [timing.step_seconds for timing in timings if timing.step_seconds]
        predicted = row["micro_batch"] * row["seq"] * len(seconds) / sum(seconds)
        kind = "compiled" if is_compiled(row) else "eager"
        yield Comparison(label_of(row), f"{group}, {kind}", predicted, row["tokens_per_s_per_gpu"], index)


def _in_scope(row: Row) -> bool:
    if not isinstance(row["tokens_per_s_per_gpu"], int | float) or any(name in row["source"] for name in FITTED):
        return False
    return not any(holds(row) for reason, holds in OUT_OF_SCOPE if reason not in OF_MEMORY_ALONE)


def _card(row: Row) -> tuple[str, str] | None:
    name = (row["gpu"] or "").lower()
    return next(((group, slug) for part, group, slug in CARDS if part.lower() in name), None)
