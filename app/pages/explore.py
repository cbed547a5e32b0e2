"""The tradeoff curve over every stored run, with the query as its whole state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.charts.dimensions import DIMENSIONS, Dimension, dimension
from app.charts.figure import METHOD_LABELS
from app.db import runs
from app.fields import NUMBERS, spell
from app.pages.access import database, prefix
from app.pages.form import form_fields
from app.pages.labels import model_name, run_label, varying
from app.pages.render import address, page
from app.pages.runs import filters_of
from app.pages.views import PEAK, SPEED, Curve, curve, prediction

router = APIRouter(include_in_schema=False)

DRAWN = 2000  # points a browser draws without a pause; the newest are kept, and the page says so
PREDICTED = 300  # runs that get a prediction beside them
COLOURS = ("attention", "model", "precision", "seq", "micro_batch", "offload_optimizer", "sharding")
FILTERS = ("model", "checkpointing", "attention", "precision", "seq", "micro_batch")

Point = Mapping[str, Any]
Option = tuple[str, str]


@dataclass(frozen=True, slots=True)
class View:
    """What the query asks for."""

    x: Dimension
    y: Dimension
    colour: str
    log_x: bool
    log_y: bool
    predictions: bool
    filters: dict[str, list[str]]

    @property
    def job_id(self) -> str:
        return self.filters.get("job_id", [""])[0]

    @property
    def query(self) -> dict[str, Any]:
        """The query that shows this view again, defaults left out."""
        return {
            **self.filters,
            "x": self.x.key if self.x != PEAK else "",
            "y": self.y.key if self.y != SPEED else "",
            "colour": self.colour if self.colour != COLOURS[0] else "",
            "log_x": "1" if self.log_x else "",
            "log_y": "1" if self.log_y else "",
            "predictions": "" if self.predictions else "0",
        }


def read_view(request: Request) -> tuple[View, str | None]:
    """The view, and what is wrong with the query (then the default stands in)."""
    query = request.query_params
    problem = None
    axes = {}
    for name, default in (("x", PEAK), ("y", SPEED)):
        wanted = query.get(name) or default.key
        if wanted not in NUMBERS:
            problem = f"{name}: {wanted[:80]!r} is no numeric field; one of {', '.join(NUMBERS)}"
            wanted = default.key
        axes[name] = dimension(wanted)
    colour = query.get("colour") or COLOURS[0]
    if colour not in form_fields():
        problem, colour = f"colour: {colour[:80]!r} is no field of a specification", COLOURS[0]
    flags = {name: query.get(name, "") in ("1", "true") for name in ("log_x", "log_y")}
    predictions = query.get("predictions", "1") not in ("0", "false")
    return View(axes["x"], axes["y"], colour, **flags, predictions=predictions, filters=filters_of(request)), problem


@router.get("/explore")
def explore(request: Request) -> Response:
    """The chart and its table."""
    view, problem = read_view(request)
    with database(request).read() as session:
        stored = runs.points(session, runs.Filters(job_id=view.filters.get("job_id", ())))
    found = [point for point in stored if _matches(point, view.filters)]
    drawn = found[-DRAWN:]
    vary = varying([point["spec"] for point in drawn])
    shown = _curve(drawn, view, vary, prefix(request))
    context = {
        "here": "/explore",
        "view": view,
        "x": view.x,
        "y": view.y,
        "problem": problem,
        "filtered": bool(view.filters),
        "selects": _selects(stored, view),
        "rows": _rows(drawn, view, vary, shown),
        "methods": [method for method in METHOD_LABELS if any(point["method"] == method for point in drawn)],
        "figure": shown.figure,
        "label": shown.label,
        "caption": shown.caption
        + (f" The newest {DRAWN} of {len(found)} runs are drawn." if len(found) > DRAWN else ""),
        "knee": shown.knee,
        "missing": shown.missing,
        "query": view.query,
        "machine_form": prefix(request) + address("/explore.json", view.query),
    }
    answer = page(request, "explore.html", context, block="explored", status=422 if problem else 200)
    answer.headers["HX-Push-Url"] = prefix(request) + address("/explore", view.query)
    return answer


def _curve(points: Sequence[Point], view: View, vary: Sequence[str], base: str) -> Curve:
    predictions = view.predictions and len(points) <= PREDICTED
    return curve(
        points, view.x, view.y, prefix=base, vary=vary, predictions=predictions,
        colour=view.colour, log_x=view.log_x, log_y=view.log_y,
    )  # fmt: skip


def _value(point: Point, key: str) -> str:
    """The text that a filter on `key` compares with."""
    if key in ("job_id", "method", "outcome"):
        return str(point[key])
    value = point["id"] if key == "ids" else point["spec"].get(key, form_fields()[key].default)
    return model_name(value) if key == "model" else spell(value)


def _matches(point: Point, filters: Mapping[str, Sequence[str]]) -> bool:
    return all(_value(point, key) in accepted for key, accepted in filters.items())


def _selects(points: Sequence[Point], view: View) -> list[tuple[str, str, list[Option], str]]:
    """(name, label, options, chosen) of the form: axes, colour, then a filter for each field with a choice to make."""
    axes = [(key, axis.label) for key, axis in DIMENSIONS.items()]
    selects = [
        ("x", "Across", _with(axes, view.x), view.x.key),
        ("y", "Up", _with(axes, view.y), view.y.key),
        ("colour", "Colour by", [(key, form_fields()[key].label) for key in COLOURS], view.colour),
    ]
    labels = {"method": "Known by", "outcome": "Outcome", **{key: form_fields()[key].label for key in FILTERS}}
    for key, label in labels.items():
        values = sorted({_value(point, key) for point in points} | set(view.filters.get(key, [])), key=_natural)
        if len(values) > 1 or key in view.filters:
            chosen = view.filters[key][0] if len(view.filters.get(key, [])) == 1 else ""
            selects.append((key, label, [("", "all"), *((value, value) for value in values)], chosen))
    return selects


def _with(axes: list[Option], chosen: Dimension) -> list[Option]:
    return axes if chosen.key in DIMENSIONS else [*axes, (chosen.key, chosen.label)]


def _natural(text: str) -> tuple[bool, float, str]:
    """Numbers by size, before words."""
    return (False, float(text), "") if text.isdecimal() else (True, 0.0, text)


def _rows(points: Sequence[Point], view: View, vary: Sequence[str], shown: Curve) -> list[dict[str, Any]]:
    front = set(shown.frontier)
    rows = []
    for point in points:
        predicted = prediction(point)[0] if point["method"] != "closed-form" and len(points) <= PREDICTED else None
        rows.append(
            {
                "id": point["id"],
                "label": run_label(point["spec"], vary),
                "method": point["method"],
                "outcome": point["outcome"],
                "x": view.x.of(point),
                "y": view.y.of(point),
                "predicted_x": view.x.of(predicted) if predicted else None,
                "on_front": point["id"] in front,
            }
        )
    return sorted(rows, key=lambda row: (row["x"] is None, row["x"] or 0))
