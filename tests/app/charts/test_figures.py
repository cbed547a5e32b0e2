"""Figures are what Plotly accepts, show every run once, and cannot be made to run a name as markup."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import plotly.graph_objects as go
import pytest

from app.charts.bars import full_width, segments
from app.charts.dimensions import DIMENSIONS, axis_scale, dimension
from app.charts.figure import LEAST_SPAN, POLICY_SYMBOLS, axis, symbol
from app.charts.timeline import timeline_figure
from app.charts.tradeoff import Point, tradeoff_figure
from app.fields import NUMBERS
from engine.units import GIB, MIB

X, Y = DIMENSIONS["memory.device_peak_bytes"], DIMENSIONS["timing.tokens_per_second"]


def a_run(name: str, peak: int | None, speed: float | None, **more: Any) -> dict[str, Any]:
    spec = {"checkpointing": more.pop("policy", "none"), "attention": more.pop("attention", "flash")} | more.pop(
        "spec", {}
    )
    memory, timing = {"device_peak_bytes": peak}, {"tokens_per_second": speed}
    return {"id": name, "method": "measured", "outcome": "ok", "spec": spec, "memory": memory, "timing": timing} | more


def points(*found: dict[str, Any]) -> list[Point]:
    return [Point(run, f"/runs/{run['id']}", run["id"]) for run in found]


def colours_of(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [colour for inner in value.values() for colour in colours_of(inner)]
    if isinstance(value, list):
        return [colour for inner in value for colour in colours_of(inner)]
    return [value] if isinstance(value, str) and value.startswith("--") else []


def accepted(figure: dict[str, Any]) -> go.Figure:
    """The figure as Plotly's own schema reads it, its colour tokens replaced as the browser does."""
    text = json.dumps(figure)
    for token in set(colours_of(figure)):
        text = text.replace(json.dumps(token), '"#123456"')
    return go.Figure(json.loads(text))


@pytest.mark.parametrize(("log_x", "log_y"), list(product((False, True), repeat=2)))
def test_plotly_accepts_every_kind_of_point(log_x: bool, log_y: bool) -> None:
    run = a_run("a", 3 * GIB, 900.0)
    predicted = a_run("b", 2 * GIB, None, method="closed-form")
    found = [
        *points(run, a_run("c", GIB, 500.0, policy="every-4"), a_run("d", None, None, outcome="failed")),
        Point(predicted, "/runs/a", "a", of=run),
        *points(a_run("e", None, None, outcome="oom", spec={"memory_limit_gib": 4})),
    ]
    figure = tradeoff_figure(found, X, Y, frontier=["c", "a"], knee="a", log_x=log_x, log_y=log_y)
    traces = accepted(figure).data
    assert {trace.type for trace in traces} == {"scatter"}
    drawn = [place for trace in traces if trace.customdata is not None for place in trace.customdata]
    assert sorted(drawn) == ["/runs/a", "/runs/a", "/runs/c", "/runs/e"]
    hollow = [trace for trace in traces if trace.marker.symbol == "circle-open" and trace.customdata is not None]
    assert [list(trace.x) for trace in hollow] == [[2.0]]
    assert [list(trace.y) for trace in hollow] == [[900.0]]


def test_a_run_out_of_memory_stands_at_its_limit_on_the_axis() -> None:
    figure = tradeoff_figure(points(a_run("a", None, None, outcome="oom", spec={"memory_limit_gib": 4})), X, Y)
    trace = figure["data"][0]
    assert (trace["x"], trace["y"], trace["marker"]["symbol"]) == ([4.0], [0], "x-thin")


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log"])
def test_runs_that_agree_do_not_look_as_if_they_differed(log: bool) -> None:
    """Six peaks within 8 bytes of 88.8 MiB: the axis spans 2 % of them, not the 8 bytes."""
    runs = [a_run(name, 93_152_500 + 8 * place, 100.0) for place, name in enumerate("ab")]
    drawn = tradeoff_figure(points(*runs), X, Y, log_x=log)["layout"]["xaxis"]
    low, high = (10**end if log else end for end in drawn["range"])
    assert low < 93_152_500 / MIB < high
    assert (high - low) / low == pytest.approx(LEAST_SPAN, rel=0.05)
    apart = [a_run("a", GIB, 100.0), a_run("b", 2 * GIB, 100.0)]
    assert "range" not in tradeoff_figure(points(*apart), X, Y, log_x=log)["layout"]["xaxis"]


def test_an_axis_of_counts_spans_whole_numbers() -> None:
    assert axis("Micro-batch", [4, 4], whole=True)["range"] == [3, 5]
    assert "range" not in axis("Micro-batch", [1, 8], whole=True)


@pytest.mark.parametrize(("values", "step"), [([0.02, 2000], 1), ([0.02, 2], "D2"), ([20, 60], None), ([1e-9, 1e9], 3)])
def test_log_ticks_are_whole_numbers(values: list[float], step: object) -> None:
    """Plotly writes the ticks between decades as one digit unless a format is given: "2" for 0.02, 20 and 2000."""
    found = axis("Peak", values, log=True)
    assert found["tickformat"] == ",~r"
    assert found.get("dtick") == step


def test_nothing_to_draw_is_an_empty_figure() -> None:
    assert tradeoff_figure([], X, Y)["data"] == []


def test_names_are_text() -> None:
    figure = tradeoff_figure(points(a_run("<b onclick=x>", GIB, 1.0, policy="<i>", attention="<u>")), X, Y)
    assert "<i>" not in json.dumps(figure["data"])
    assert "<b onclick" not in json.dumps(figure["data"][0]["hovertext"])


def test_each_policy_has_a_shape_of_its_own() -> None:
    names = ("none", "per-layer", "sqrt", "every-3", "selective:norms", "nested", "budget-0.5")
    assert [symbol(name) for name in names] == list(POLICY_SYMBOLS.values())
    assert len(set(POLICY_SYMBOLS.values())) == len(names)


def test_timeline_marks_the_peak_and_stacks_to_it() -> None:
    timeline = {
        "x_unit": "seconds", "x": [0.0, 0.5, 1.0], "parameters": [MIB] * 3, "gradients": [0, 0, MIB],
        "optimizer_states": [0, 0, 0], "activations": [0, 3 * MIB, 0], "temporaries": [0, MIB, 0],
        "phases": [{"name": "forward", "start": 0.0, "end": 0.5}, {"name": "backward", "start": 0.5, "end": 1.0}],
        "blocks": [], "peak_index": 1, "alive_at_peak": [],
    }  # fmt: skip
    figure = timeline_figure(timeline)
    traces = accepted(figure).data
    assert sum(trace.y[1] for trace in traces) == 5.0
    assert [trace.name for trace in traces] == ["Parameters", "Gradients", "Activations", "Temporaries"]
    peak = figure["layout"]["annotations"][-1]
    assert (peak["x"], peak["y"], peak["text"]) == (500.0, 5.0, "peak 5.00 MiB")


def test_bars_fill_what_they_hold() -> None:
    pieces = segments({"parameters": 25, "gradients": 0, "activations": 50}, 100)
    assert [(piece.category, piece.x, piece.width) for piece in pieces] == [
        ("parameters", 0, 25),
        ("activations", 25, 50),
    ]
    assert segments({"parameters": 300}, 100)[0].width == 100
    assert segments(None, 100) == []
    assert full_width([10**15], 100) == 400  # what fits stays readable beside what does not by far


def test_every_number_of_a_result_can_be_an_axis() -> None:
    for path in NUMBERS:
        axis = dimension(path)
        assert axis.show(None) == "–"
        assert axis.show(1.0)
        assert axis_scale(axis, []).size > 0
    assert dimension("memory.nvme_written_bytes_per_step").kind in ("bytes", "count")
    assert set(DIMENSIONS) <= set(NUMBERS)
