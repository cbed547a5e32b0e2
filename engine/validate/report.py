"""The accuracy report as one JSON object and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from engine.environment import environment
from engine.training import resolve_device
from engine.units import format_bytes
from engine.validate import published
from engine.validate.catalog import THEIR_CLASS
from engine.validate.statistics import Comparison, Summary, outliers, summarise

TITLES = {
    "simulation": "Simulated against measured on this machine",
    "catalog": "Closed form against simulation, over the catalog",
    "published": "Closed form against published measurements",
}


def section(comparisons: Iterable[Comparison]) -> dict[str, Any]:
    """Rows and, by group, what they come to."""
    rows = list(comparisons)
    groups = list(dict.fromkeys(row.group for row in rows))
    summaries = {group: summarise([row for row in rows if row.group == group]) for group in groups}
    return {
        "summaries": {group: summary.as_dict() for group, summary in summaries.items() if summary is not None},
        "rows": [_row(row) for row in rows],
        "outliers": [_row(row) | {"note": _note(row)} for row in outliers(rows)],
    }


def _row(row: Comparison) -> dict[str, Any]:
    return {
        "label": row.label, "group": row.group, "predicted_bytes": round(row.predicted),
        "actual_bytes": round(row.actual), "error": round(row.error, 6), "published_row": row.row,
    }  # fmt: skip


def _note(row: Comparison) -> str:
    if row.group == THEIR_CLASS:
        return "the class keeps more: norms and activations by parts and in fp32, its own loss with fp32 logits"
    return published.UNSAID.get(row.row, "no explanation") if row.row is not None else ""


def report(sections: dict[str, Iterable[Comparison]]) -> dict[str, Any]:
    """The whole report. Sections are evaluated here, in order."""
    made: dict[str, Any] = {name: section(rows) for name, rows in sections.items()}
    if "published" in made:
        made["published"]["out_of_scope"] = published.counts_out()
        made["published"]["reserved_over_allocated"] = round(published.reserved_over_allocated(), 4)
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
        lines += ["Rows that are not judged, and why:", ""]
        lines += [f"- {count}: {reason}" for reason, count in made["out_of_scope"].items()] + [""]
        lines += ["Judged rows:", "", *_row_table(made["rows"]), ""]
    return lines


def _row_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    head = ["| what | quantity | predicted | true | error | note |", "|---|---|---:|---:|---:|---|"]
    return head + [
        f"| {row['label'].replace('|', '/')} | {row['group']} | {format_bytes(row['predicted_bytes'])} | "
        f"{format_bytes(row['actual_bytes'])} | {row['error']:+.1%} | {row.get('note', '')} |"
        for row in rows
    ]
