"""What every figure shares: layout, axes, text that cannot become markup."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

Figure = dict[str, Any]

CATEGORIES = {
    "parameters": "Parameters",
    "gradients": "Gradients",
    "optimizer_states": "Optimizer states",
    "activations": "Activations",
    "temporaries": "Temporaries",
}
CATEGORY_COLOURS = {key: f"--{key.replace('_', '-')}" for key in CATEGORIES}

POLICY_SYMBOLS = {
    "none": "circle",
    "per-layer": "square",
    "sqrt": "diamond",
    "every": "triangle-up",
    "selective": "star",
    "nested": "hexagon",
    "budget": "pentagon",
}
SERIES = tuple(f"--series-{number}" for number in range(1, 7))

LEAST_SPAN = 0.02
"""An axis covers at least this share of its values: runs that agree must not look as if they differed."""

METHOD_LABELS = {"measured": "measured", "simulated": "simulated", "closed-form": "closed form"}


def policy_family(checkpointing: str) -> str:
    """`every-4` -> `every`, `selective:norms+dropout` -> `selective`: what decides the marker's shape."""
    return checkpointing if checkpointing in POLICY_SYMBOLS else checkpointing.partition(":")[0].partition("-")[0]


def symbol(checkpointing: str, hollow: bool = False) -> str:
    shape = POLICY_SYMBOLS.get(policy_family(checkpointing), "hourglass")
    return f"{shape}-open" if hollow else shape


def text(value: object) -> str:
    """Plotly draws a subset of HTML in its text: a name from a user must not use it."""
    return escape(str(value))


def axis(
    title: str, values: Sequence[float] = (), *, log: bool = False, zero: bool = False, whole: bool = False
) -> dict[str, Any]:
    """An axis for `values`, the drawn ones. `zero`: it starts at zero; `whole`: only integers mean something on it."""
    shared = {
        "title": {"text": text(title), "standoff": 10},
        "gridcolor": "--line",
        "linecolor": "--line-strong",
        "tickcolor": "--line-strong",
        "zeroline": False,
        "automargin": True,
    }
    low, high = min(values, default=0.0), max(values, default=0.0)
    if log:
        return shared | _log_axis([value for value in values if value > 0])
    shared |= {"type": "linear", "rangemode": "tozero" if zero else "nonnegative", "separatethousands": True}
    margin = max(LEAST_SPAN * high, 2.0 if whole else 0.0) / 2
    if not zero and high and high - low < 2 * margin:
        middle = (low + high) / 2
        shared["range"] = [max(middle - margin, 0.0), middle + margin]
    return shared


def _log_axis(values: Sequence[float]) -> dict[str, Any]:
    """Each tick is written as a whole number, not as the digit that Plotly puts between decades: steps of 1-2-5, of
    decades where these would crowd, and Plotly's own where less than a decade is shown."""
    low, high = min(values, default=1.0), max(values, default=1.0)
    found: dict[str, Any] = {"type": "log", "tickformat": ",~r"}
    if high < low * (1 + LEAST_SPAN):
        margin = math.log10(1 + LEAST_SPAN) / 2
        middle = math.log10(low * high) / 2
        return found | {"range": [middle - margin, middle + margin]}
    decades = math.log10(high / low)
    if decades < 0.8:
        return found
    return found | {"dtick": "D2" if decades < 2.5 else math.ceil(decades / 8)}


def figure(data: list[dict[str, Any]], x: dict[str, Any], y: dict[str, Any], **layout: Any) -> Figure:
    """Data and axes on the layout that all of Remat's figures share."""
    base = {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "--ink", "size": 13, "family": "system-ui, sans-serif"},
        "margin": {"l": 56, "r": 16, "t": 24, "b": 48},
        "hoverlabel": {
            "bgcolor": "--surface",
            "bordercolor": "--line-strong",
            "font": {"color": "--ink"},
            "align": "left",
        },
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 12}},
        "hovermode": "closest",
        "dragmode": "zoom",
    }
    return {"data": data, "layout": base | {"xaxis": x, "yaxis": y} | layout}
