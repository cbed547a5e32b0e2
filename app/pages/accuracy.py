"""How far each prediction was off, where it could be checked: the report that `remat validate` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from app.charts.accuracy import QUANTITIES, accuracy_figure
from app.pages.access import prefix
from app.pages.labels import facts
from app.pages.render import page
from engine.catalog import DATA

router = APIRouter(include_in_schema=False)

SECTIONS = {
    "simulation": (
        "Simulated against measured",
        "Small training steps, simulated and then really run on one machine: peak bytes in the device's allocator.",
    ),
    "catalog": (
        "Closed form against simulated",
        "Every model of the catalog in Remat's own decoder, under every policy that the closed form knows.",
    ),
    "published": (
        "Closed form against published measurements",
        "Peak memory that others measured on GPUs, each run predicted with what its own training code keeps. No "
        "constant was fitted to a row that it is judged on.",
    ),
    "speed": (
        "Predicted against published tokens a second",
        "A roofline at each card's achieved rates. Sources that a rate was taken from are not judged. Meta's H100, "
        "held to 500 W, is slower than the H100 SXM that it is predicted as; eager codes of many small ops are slower "
        "than ours.",
    ),
}


@cache
def accuracy_report() -> dict[str, Any]:
    """The report that ships with this version."""
    report: dict[str, Any] = json.loads((DATA / "accuracy.json").read_text())
    return report


def _drawn(section: dict[str, Any]) -> dict[str, Any]:
    """A section with its figure and the way its values are written."""
    unit = section["unit"]
    drawn = {"figure": accuracy_figure(section["rows"], unit), "write": QUANTITIES[unit].write}
    return section | drawn | {"groups": list(_grouped(section["summaries"]))}


def _grouped(summaries: Mapping[str, Any]) -> Iterator[tuple[str, bool, Any]]:
    """(name, whether it is a part of the total above it, summary): each total, then its parts."""
    for name, summary in summaries.items():
        total, _, part = name.partition(", ")
        if not part or total not in summaries:
            yield name, False, summary
            yield from ((each, True, parts) for each, parts in summaries.items() if each.startswith(f"{name}, "))


@router.get("/accuracy")
def accuracy(request: Request) -> Response:
    report = accuracy_report()
    sections = [
        {"key": key, "title": title, "text": text, **_drawn(report[key])}
        for key, (title, text) in SECTIONS.items()
        if key in report
    ]
    context = {
        "here": "/accuracy",
        "sections": sections,
        "created_at": report["created_at"],
        "environment": facts(report["environment"]),
        "machine_form": prefix(request) + "/accuracy.json",
    }
    return page(request, "accuracy.html", context)


@router.get("/accuracy.json")
def accuracy_json() -> Response:
    return JSONResponse(accuracy_report())
