"""What every figure shares: layout, axes, text that cannot become markup."""

from __future__ import annotations

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


def axis(title: str, *, log: bool = False, zero: bool = False) -> dict[str, Any]:
    shared = {
        "title": {"text": text(title), "standoff": 10},
        "gridcolor": "--line",
        "linecolor": "--line-strong",
        "tickcolor": "--line-strong",
        "zeroline": False,
        "automargin": True,
    }
    if log:
        return shared | {"type": "log", "dtick": "D2", "exponentformat": "none"}
    return shared | {"type": "linear", "rangemode": "tozero" if zero else "normal", "separatethousands": True}


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
