"""The accuracy report as one JSON object and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from engine.environment import environment
from engine.training import resolve_device
from engine.units import format_bytes
from engine.validate import published
from engine.validate.catalog import THEIR_CLASS
from engine.validate.statistics import TOO_LOW, Comparison, Summary, outliers, summarise

TITLES = {
    "simulation": "Simulated against measured on this machine",
    "catalog": "Closed form against simulation, over the catalog",
    "published": "Closed form against published measurements",
    "speed": "Predicted against published tokens a second",
}

UNITS = {"speed": "tokens_per_second"}
"""Of sections that are not in bytes."""


def section(comparisons: Iterable[Comparison], unit: str = "bytes") -> dict[str, Any]:
    """Rows and, by group, what they come to; of memory also the outliers, each with its note."""
    rows = list(comparisons)
    return {
        "summaries": {name: summary.as_dict() for name, summary in _summaries(rows)},
        "unit": unit,
        "rows": [_row(row, unit) for row in rows],
        "outliers": [_row(row, unit) | {"note": _note(row)} for row in outliers(rows) if unit == "bytes"],
    }


def _summaries(rows: Sequence[Comparison]) -> Iterator[tuple[str, Summary]]:
    """By group; and where groups are kinds of one quantity ("reserved, eager"), by quantity."""
    groups = dict.fromkeys(row.group for row in rows)
    quantities = [group.split(", ")[0] for group in groups]
    for name in [*dict.fromkeys(quantity for quantity in quantities if quantities.count(quantity) > 1), *groups]:
        chosen = [row for row in rows if name == row.group or row.group.startswith(f"{name}, ")]
        if summary := summarise(chosen):
            yield name, summary


def _row(row: Comparison, unit: str) -> dict[str, Any]:
    return {
        "label": row.label, "group": row.group, f"predicted_{unit}": round(row.predicted),
        f"actual_{unit}": round(row.actual), "error": round(row.error, 6), "published_row": row.row,
    }  # fmt: skip


def _note(row: Comparison) -> str:
    if row.group == THEIR_CLASS:
        return "the class keeps more: norms and activations by parts and in fp32, its own loss with fp32 logits"
    return published.UNSAID.get(row.row, "no explanation") if row.row is not None else ""


def report(sections: dict[str, Iterable[Comparison]]) -> dict[str, Any]:
    """The whole report. Sections are evaluated here, in order."""
    made: dict[str, Any] = {name: section(rows, UNITS.get(name, "bytes")) for name, rows in sections.items()}
    if "published" in made:
        made["published"]["out_of_scope"] = published.counts_out()
        made["published"]["too_low"] = [row for row in made["published"]["rows"] if row["error"] < -TOO_LOW]
        for row in made["published"]["too_low"]:
            row["note"] = published.UNSAID.get(row["published_row"], "no explanation")
        made["published"]["reserved_over_main"] = {
            kind: round(published.reserved_over_main(compiled=kind == "compiled"), 4) for kind in ("eager", "compiled")
        }
    return {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(resolve_device("cpu")),
        **made,
    }


def markdown(made: dict[str, Any]) -> str:
    """The same for people."""
    lines = ["# Accuracy", "", f"`python -m engine.validate`, {made['created_at']}, torch "
             f"{made['environment']['torch']}, {made['environment']['cpu']}.", ""]  # fmt: skip
    for name, title in TITLES.items():
        if name in made:
            lines += [f"## {title}", "", *_summary_table(made[name]["summaries"]), ""]
            lines += _extra(name, made[name])
    return "\n".join(lines) + "\n"


def _summary_table(summaries: dict[str, dict[str, Any]]) -> list[str]:
    head = ["| group | rows | median | p90 | worst | bias | too low by > 3 % |", "|---|---:|---:|---:|---:|---:|---:|"]
    return head + [_summary_line(group, Summary(**values)) for group, values in summaries.items()]


def _summary_line(group: str, summary: Summary) -> str:
    cells = (summary.median_error, summary.p90_error, summary.worst_error)
    numbers = " | ".join(f"{value:.2%}" for value in cells)
    return f"| {group} | {summary.count} | {numbers} | {summary.bias:+.2%} | {summary.under_estimate_rate:.0%} |"


def _extra(name: str, made: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    if made["outliers"]:
        lines += ["Off by more than 20 %:", "", *_row_table(made["outliers"]), ""]
    if name == "published":
        lines += [_fitted(made["reserved_over_main"]), ""]
        if made["too_low"]:
            lines += ["Predicted more than 3 % too low:", "", *_row_table(made["too_low"]), ""]
        lines += ["Rows that are not judged, and why:", ""]
        lines += [f"- {count}: {reason}" for reason, count in made["out_of_scope"].items()] + [""]
        lines += ["Judged rows:", "", *_row_table(made["rows"]), ""]
    return lines


def _fitted(factors: dict[str, float]) -> str:
    return (
        f"Reserved peaks are what is alive outside the side streams' memory pools, times {factors['eager']} (eager) or "
        f"{factors['compiled']} (compiled), plus those pools. The factors are the 90th percentiles of one source "
        f"({published.RATIO_SOURCE}), whose rows are not judged by them. Allocated peaks have no factor."
    )


def _row_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    head = ["| what | quantity | predicted | true | error | note |", "|---|---|---:|---:|---:|---|"]
    return head + [
        f"| {row['label'].replace('|', '/')} | {row['group']} | {format_bytes(row['predicted_bytes'])} | "
        f"{format_bytes(row['actual_bytes'])} | {row['error']:+.1%} | {row.get('note', '')} |"
        for row in rows
    ]
