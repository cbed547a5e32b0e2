"""Runs: the list, one of them in full, several side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import Response

from app.charts.bars import full_width, segments
from app.charts.dimensions import DIMENSIONS
from app.charts.figure import CATEGORIES, METHOD_LABELS
from app.charts.timeline import timeline_figure
from app.db import runs
from app.pages import comparison
from app.pages.access import database, prefix
from app.pages.commands import as_cli, as_curl, as_python
from app.pages.form import form_fields, query_of
from app.pages.labels import MAIN, facts, full_spec, run_label, varying
from app.pages.render import address, page
from app.pages.views import PEAK, SPEED, Result, peak_bars, percent_off, prediction, signed_percent
from engine.errors import SpecError
from engine.result import Method, Outcome
from engine.units import format_bytes, format_count, format_seconds

router = APIRouter(include_in_schema=False)

COLUMNS = ("memory.device_peak_bytes", "timing.step_seconds", "timing.tokens_per_second", "timing.mfu")
LIST_FILTERS = ("method", "outcome", "attention", "precision")
LEDGER_ROWS = 400
ALIVE_ROWS = 12
APART = (
    "It was recorded in a pass of its own that follows every allocation (on a CPU, under the profiler): its seconds "
    "are longer than those of the timing."
)


@dataclass(frozen=True, slots=True)
class Column:
    label: str
    href: str
    sorted: str | None


@router.get("/runs")
def list_runs(
    request: Request,
    sort: Annotated[str, Query(max_length=100)] = "-created_at",
    cursor: Annotated[str | None, Query(max_length=500)] = None,
) -> Response:
    """The list; any RunSpec key in the query filters it. A column that no listed run has a number for is left out,
    unless the list is sorted by it."""
    chosen = filters_of(request)
    context: dict[str, Any] = {
        "here": "/runs",
        "filters": chosen,
        "filtered": bool(chosen),
        "selects": _selects(chosen),
    }
    try:
        with database(request).read() as session:
            found = runs.page(session, as_filters(chosen), sort or "-created_at", cursor=cursor or None)
    except SpecError as error:
        return page(
            request, "runs.html", context | {"problem": f"{error.field}: {error.message}"}, block="listed", status=422
        )
    vary = varying([run["spec"] for run in found.items])
    told = [key for key in COLUMNS if key in sort or any(DIMENSIONS[key].of(run) is not None for run in found.items)]
    following = address("/runs", {**chosen, "sort": sort, "cursor": found.next_cursor}) if found.next_cursor else None
    context |= {
        "rows": [_row(result, told, [*MAIN, *(key for key in vary if key not in MAIN)]) for result in found.items],
        "columns": [_column(key, DIMENSIONS[key].label, sort, chosen) for key in told],
        "time_column": _column("created_at", "When", sort, chosen),
        "next_url": following and prefix(request) + following,
        "csv_url": prefix(request) + address("/runs.csv", chosen),
        "machine_form": prefix(request)
        + address("/runs.json", {**chosen, "sort": sort if sort != "-created_at" else ""}),
    }
    answer = page(request, "runs.html", context, block="listed")
    answer.headers["HX-Push-Url"] = prefix(request) + address(
        "/runs", {**chosen, "sort": sort if sort != "-created_at" else ""}
    )
    return answer


def filters_of(request: Request) -> dict[str, list[str]]:
    """The query's filters: a job, a method, an outcome, ids, or any field of a spec."""
    known = {"job_id", "method", "outcome", "ids", *form_fields()}
    query = request.query_params
    found = {key: [value for value in query.getlist(key) if value] for key in query if key in known}
    return {key: values for key, values in found.items() if values}


def as_filters(chosen: Mapping[str, Sequence[str]]) -> runs.Filters:
    """Raises SpecError for a method or an outcome that there is not."""
    for key, accepted in (("method", get_args(Method)), ("outcome", get_args(Outcome))):
        for value in chosen.get(key, ()):
            if value not in accepted:
                raise SpecError(key, f"{value[:40]!r} is not known; one of {', '.join(accepted)}")
    own = {key: chosen[key] for key in ("job_id", "method", "outcome", "ids") if key in chosen}
    return runs.Filters(spec={key: values for key, values in chosen.items() if key not in own}, **own)


def _selects(chosen: Mapping[str, list[str]]) -> list[tuple[str, str, list[tuple[str, str]], str]]:
    """(name, label, options, chosen) of the list's filters."""
    words = {
        "method": ("Known by", list(METHOD_LABELS.items())),
        "outcome": ("Outcome", [("ok", "ok"), ("oom", "out of memory"), ("failed", "failed")]),
        **{key: (form_fields()[key].label, [(c, c) for c in form_fields()[key].choices]) for key in LIST_FILTERS[2:]},
    }
    return [
        (key, words[key][0], [("", "all"), *words[key][1]], chosen[key][0] if len(chosen.get(key, [])) == 1 else "")
        for key in LIST_FILTERS
    ]


def _row(result: Result, columns: Sequence[str], vary: Sequence[str]) -> dict[str, Any]:
    cells = [DIMENSIONS[key].show(DIMENSIONS[key].of(result)) for key in columns]
    shared = {key: result[key] for key in ("id", "method", "outcome", "created_at")}
    return {**shared, "label": run_label(result["spec"], vary), "cells": cells}


def _column(key: str, label: str, sort: str, chosen: Mapping[str, Any]) -> Column:
    """A heading that sorts by its column, or turns the order round when it already does."""
    descending = sort == f"-{key}"
    state = "descending" if descending else "ascending" if sort == key else None
    return Column(label, address("/runs", {**chosen, "sort": key if descending else f"-{key}"}), state)


@router.get("/runs/{run_id}")
def show_run(request: Request, run_id: str) -> Response:
    """Everything that is known of one run."""
    with database(request).read() as session:
        run = runs.get(session, run_id)
        timeline = runs.timeline(session, run_id) if run else None
    if run is None:
        raise HTTPException(404, "No run has this id.")
    predicted, missing = (None, None) if run["method"] == "closed-form" else prediction(run)
    shown = [run, *([predicted] if predicted else [])]
    payload = {"spec": _changed(run["spec"]), "method": run["method"]}
    base = str(request.base_url).rstrip("/")
    context = {
        "here": "/runs",
        "run": run,
        "label": run_label(run["spec"]),
        "job_id": run["job_id"],
        "on_cpu": run["environment"].get("device_kind") == "cpu",
        "facts": _facts(run, predicted),
        "bars": peak_bars(shown, missing),
        "categories_table": _categories(shown),
        "timeline": _timeline(timeline) if timeline else None,
        "comparison": _comparison(run, predicted) if predicted else [],
        "phases": _phases(run),
        "ledger": (run["ledger"] or (predicted or {}).get("ledger") or [])[:LEDGER_ROWS],
        "ranks": run["ranks"],
        "specification": full_spec(run["spec"]),
        "environment": facts(run["environment"]),
        "duplicate": query_of(run["spec"], method="" if run["method"] == "measured" else run["method"]),
        "commands": {
            "curl": as_curl(payload, base),
            "Python": as_python(payload, base),
            "Command line": as_cli(payload),
        },
        "machine_form": f"{prefix(request)}/runs/{run_id}.json",
    }
    return page(request, "run.html", context)


def _changed(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The model and every field that is not the default."""
    fields = form_fields()
    return {key: value for key, value in spec.items() if key == "model" or value != fields[key].default}


def _facts(run: Result, predicted: Result | None) -> list[tuple[str, str, str]]:
    """The headline numbers: (name, value, what to know about it)."""
    memory, timing = run["memory"], run["timing"]
    off = percent_off(PEAK.of(predicted), PEAK.of(run)) if predicted and run["outcome"] == "ok" else None
    low, high = timing["step_seconds_p20"], timing["step_seconds_p80"]
    steps = f"{timing['steps']} step{'s' * (timing['steps'] != 1)}"
    spread = f"p20 to p80: {format_seconds(low)} to {format_seconds(high)}, {steps}" if low and high else ""
    phase = f"in the {memory['peak_phase']} phase" if memory["peak_phase"] else ""
    expected = PEAK.of(predicted) if predicted else None
    compared = "closed form" if off is None else f"closed form, off by {signed_percent(off, 2)}"
    found = [
        ("Peak memory", format_bytes(memory["device_peak_bytes"]), phase),
        ("Predicted peak", format_bytes(expected), compared),
        ("Saved for backward", format_bytes(memory["saved_activation_bytes"]), ""),
        ("Step", format_seconds(timing["step_seconds"]), spread),
        ("Tokens per second", SPEED.show(timing["tokens_per_second"]), ""),
        ("Model FLOPs utilisation", DIMENSIONS["timing.mfu"].show(timing["mfu"]), ""),
        ("Parameters", format_count(run["parameters"]), ""),
    ]  # fmt: skip
    return [fact for fact in found if fact[1] != "–"]


def _categories(shown: Sequence[Result]) -> list[tuple[str, list[int | None]]]:
    tables = [result["memory"]["at_peak"] for result in shown]
    if not all(tables) or len(tables) < 2:
        return []
    return [(label, [table[key] for table in tables]) for key, label in CATEGORIES.items()]


def _comparison(run: Result, predicted: Result) -> list[dict[str, str]]:
    """Every quantity that both know."""
    rows = []
    for dimension in DIMENSIONS.values():
        own, expected = dimension.of(run), dimension.of(predicted)
        if own is None or expected is None or dimension.key.startswith("spec."):
            continue
        off = percent_off(expected, own)
        error = signed_percent(off, 2)
        rows.append(
            {"name": dimension.label, "own": dimension.show(own), "predicted": dimension.show(expected), "error": error}
        )
    return rows


def _phases(run: Result) -> list[tuple[str, str]]:
    phases = run["timing"]["phases_seconds"]
    named = [
        (key.replace("_", " ").capitalize(), format_seconds(value))
        for key, value in phases.items()
        if value is not None
    ]
    flops = [
        (DIMENSIONS[key].label, DIMENSIONS[key].show(DIMENSIONS[key].of(run)))
        for key in ("timing.model_flops", "timing.hardware_flops", "timing.hfu")
    ]
    kernel = ("Attention kernel", run["environment"].get("attention_kernel", "–"))
    return [row for row in (*named, *flops, kernel) if row[1] != "–"]


def _timeline(timeline: Mapping[str, Any]) -> dict[str, Any]:
    phases = ", ".join(str(phase["name"]) for phase in timeline["phases"])
    timed = timeline["x_unit"] == "seconds"
    unit = "time" if timed else "allocator events, not time"
    peak = sum(timeline[key][timeline["peak_index"]] for key in CATEGORIES) if timeline["x"] else 0
    caption = f"Every allocation of one step ({phases}); across: {unit}. The peak is {format_bytes(peak)}."
    return {
        "figure": timeline_figure(timeline),
        "caption": f"{caption} {APART}" if timed else caption,
        "alive": [_alive(kind) for kind in timeline["alive_at_peak"][:ALIVE_ROWS]],
        "cut": len(timeline["alive_at_peak"]) >= ALIVE_ROWS,
    }


def _alive(kind: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """(where, category, count × size, total) of equal tensors that were made in one place."""
    count, total = kind["count"], kind["bytes"]
    category = CATEGORIES.get(kind["category"], kind["category"])
    return kind["where"], category, f"{count:,} × {format_bytes(total / count)}", format_bytes(total)


@router.get("/compare")
def compare(request: Request, ids: Annotated[list[str] | None, Query(max_length=100)] = None) -> Response:
    """Two to six runs; the first is what the others are compared with."""
    wanted = list(dict.fromkeys(part for text in ids or [] for part in text.split(",") if part))
    if not comparison.LEAST <= len(wanted) <= comparison.MOST:
        return _refused(request, f"Choose {comparison.LEAST} to {comparison.MOST} runs; {len(wanted)} were given.", 422)
    with database(request).read() as session:
        found = {identifier: runs.get(session, identifier) for identifier in wanted}
    if missing := [identifier for identifier, run in found.items() if run is None]:
        return _refused(request, f"No run has the id {missing[0][:64]}.", 404)
    results = [run for run in found.values() if run is not None]
    full = full_width([PEAK.of(run) or 0 for run in results], None)
    vary = [key for key, _ in comparison.spec_rows(results)]
    environment = comparison.environment_rows(results)
    context = {
        "here": "/runs",
        "runs": [
            {
                "id": run["id"],
                "label": run_label(run["spec"], vary),
                "method": run["method"],
                "peak": PEAK.of(run),
                "segments": segments(run["memory"]["at_peak"], full),
            }
            for run in results
        ],
        "numbers": comparison.number_rows(results),
        "same_tokens": comparison.same_tokens(results),
        "spec_rows": comparison.spec_rows(results),
        "environment_rows": environment,
        "environment_differs": [key.replace("_", " ") for key, _ in environment],
        "machine_form": prefix(request) + address("/runs.json", {"ids": wanted}),
    }
    return page(request, "compare.html", context)


def _refused(request: Request, problem: str, status: int) -> Response:
    return page(request, "compare.html", {"here": "/runs", "problem": problem}, status=status)
