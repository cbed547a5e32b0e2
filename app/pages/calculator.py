"""What fits, by closed form: one row a way to save memory, against the GPU's limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import ValidationError
from starlette.datastructures import QueryParams

from app.charts.bars import Segment, full_width, segments
from app.pages.form import COMMON_POLICIES, Draft, draft, field_errors, form_fields, parse, query_of
from engine.catalog import Gpu, gpu, model_configs
from engine.closed_form import predict
from engine.closed_form.fits import usable_bytes
from engine.errors import SpecError
from engine.result import RunResult
from engine.spec import RunSpec

DEFAULTS: dict[str, list[str]] = {
    "model": ["llama-3.2-1b"],
    "gpu": ["a100-80gb-sxm"],
    "micro_batch": ["8"],
    "seq": ["4096"],
}
MORE_FIELDS = (
    "precision",
    "optimizer",
    "attention",
    "grad_accumulation",
    "dropout",
    "loss_chunks",
    "sharding",
    "world_size",
    "offload_optimizer",
    "offload_parameters",
    "offload_activations",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One policy: its prediction, or why there is none."""

    name: str
    spec: RunSpec
    result: RunResult | None
    segments: list[Segment]
    fits: bool | None
    headroom_bytes: int | None
    missing: str | None
    verify: Mapping[str, Any]

    @property
    def peak_bytes(self) -> int | None:
        return self.result.memory.device_peak_bytes if self.result else None


@dataclass(frozen=True, slots=True)
class Answer:
    """The calculator's table. `limit_at` is the limit's place on the bars in percent."""

    rows: list[Row]
    card: Gpu | None
    limit_bytes: int | None
    """What of the card's memory is usable: the limit that the plan below holds to as well."""
    limit_at: float | None

    @property
    def missing(self) -> str | None:
        """Why no row has a prediction, where all have the same reason."""
        reasons = {row.missing for row in self.rows}
        return reasons.pop() if len(reasons) == 1 else None

    @property
    def chosen(self) -> Row | None:
        """The first row that fits (rows recompute more and more), or the lightest."""
        known = [row for row in self.rows if row.peak_bytes is not None]
        return next((row for row in known if row.fits), min(known, key=lambda row: row.peak_bytes or 0, default=None))


def read_calculator(query: QueryParams) -> Draft:
    """The query over the defaults, one value a field: of several the first counts, and a list is refused."""
    typed = {key: values[:1] for key, values in parse(query).values.items() if key in form_fields()}
    typed = {key: [""] for key in DEFAULTS if key in query} | typed  # left blank on purpose: what its field then says
    asked = draft({**DEFAULTS, **typed})
    if not asked.errors and len(asked.runs) != 1:
        several = next(iter(asked.payload["vary"]), "model")
        asked.errors[several] = "one value here; a benchmark can compare several"
    return asked


def closed_form(spec: RunSpec) -> tuple[RunResult | None, str | None]:
    """The prediction, or the reason why this spec has none."""
    return _closed_form(spec.model_dump_json())


@lru_cache(maxsize=2048)
def _closed_form(spec_json: str) -> tuple[RunResult | None, str | None]:
    try:
        return predict(RunSpec.model_validate_json(spec_json)), None
    except SpecError as error:
        return None, error.message


def answer(asked: Draft) -> Answer | None:
    """The table for a draft whose fields hold one value each; None, with asked.errors set, for a refused one."""
    if asked.errors or not asked.runs:
        return None
    base = asked.runs[0]
    try:
        rows = [(policy, *_predicted(base, policy)) for policy in _policies(base)]
    except (ValidationError, SpecError) as error:
        asked.errors |= field_errors(error)
        return None
    card = gpu(base.gpu) if base.gpu else None
    limit = usable_bytes(card, base.world_size) if card else None
    peaks = {name: result.memory.device_peak_bytes or 0 for name, _, result, _ in rows if result}
    full = full_width(list(peaks.values()), limit)
    return Answer(
        rows=[_row(name, spec, result, missing, full, limit) for name, spec, result, missing in rows],
        card=card,
        limit_bytes=limit,
        limit_at=round(100 * limit / full, 3) if limit else None,
    )


def class_query(spec: RunSpec) -> dict[str, Any]:
    """The query of /jobs/new that simulates the transformers class of a catalog's config; empty where there is none:
    for shapes that no config holds, and for inference, which runs in Remat's own decoder alone."""
    if spec.architecture.made_up or spec.mode != "train":
        return {}
    # By its name, a model that Remat's decoder has would run in that; by its config, its own class runs.
    model = spec.model if spec.runs_transformers else model_configs()[str(spec.model)]
    return query_of({**spec.model_dump(), "model": model}, {"checkpointing": ["none", "per-layer"]}, method="simulated")


def _policies(base: RunSpec) -> Iterator[str]:
    """The common policies, and the one asked for when it is none of them."""
    yield from COMMON_POLICIES
    if base.checkpointing not in COMMON_POLICIES:
        yield base.checkpointing


def _predicted(base: RunSpec, policy: str) -> tuple[RunSpec, RunResult | None, str | None]:
    spec = RunSpec.model_validate(base.model_dump() | {"checkpointing": policy})
    return spec, *closed_form(spec)


def _row(
    name: str, spec: RunSpec, result: RunResult | None, missing: str | None, full: float, limit: int | None
) -> Row:
    peak = result.memory.device_peak_bytes if result else None
    at_peak = result.memory.at_peak.model_dump() if result and result.memory.at_peak else None
    headroom = limit - peak if limit is not None and peak is not None else None
    return Row(
        name=name,
        spec=spec,
        result=result,
        segments=segments(at_peak, full),
        fits=None if headroom is None else headroom >= 0,
        headroom_bytes=headroom,
        missing=missing,
        verify=query_of(spec.model_dump()),
    )
