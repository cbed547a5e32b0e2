"""`python -m engine.validate [--configs] [--only SECTION]... [--json] [--write FOLDER]`: how accurate Remat is.

Without options: all sections, Markdown on stdout. `--configs` checks that every config of the catalog can be
simulated instead. `--write FOLDER` leaves `accuracy.json` and `accuracy.md` there. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")

from engine.validate import catalog, grid, published, speed
from engine.validate.report import TITLES, markdown, report
from engine.validate.statistics import Comparison

SECTIONS: dict[str, Callable[[], Iterable[Comparison]]] = {
    "simulation": grid.compare,
    "catalog": catalog.compare,
    "published": published.compare,
    "speed": speed.compare,
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="remat validate", description=__doc__)
    parser.add_argument("--configs", action="store_true", help="simulate every config of the catalog")
    parser.add_argument("--only", action="append", choices=list(TITLES), help="a section (repeatable)")
    parser.add_argument("--json", action="store_true", help="JSON on stdout")
    parser.add_argument("--write", type=Path, help="folder for accuracy.json and accuracy.md")
    options = parser.parse_args(arguments)
    if options.write:
        try:
            options.write.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"argument --write: cannot make {options.write}: {error.strerror}")
    if options.configs:
        _configs(options.json)
        return
    names = options.only or list(SECTIONS)
    made = report({name: _progress(name, SECTIONS[name]()) for name in names})
    print(json.dumps(made) if options.json else markdown(made))
    if options.write:
        (options.write / "accuracy.json").write_text(json.dumps(made, indent=1) + "\n")
        (options.write / "accuracy.md").write_text(markdown(made))


def _configs(as_json: bool) -> None:
    for check in catalog.check_configs():
        if as_json:
            print(json.dumps(asdict(check)), flush=True)
        else:
            outcome = check.reason or f"{check.parameters:,} parameters"
            print(f"{check.name:28} {check.seconds:6.1f} s  {outcome}", flush=True)


def _progress(name: str, rows: Iterable[Comparison]) -> Iterator[Comparison]:
    for number, row in enumerate(rows, 1):
        print(f"{name} {number}: {row.label[:90]} {row.error:+.2%}", file=sys.stderr, flush=True)
        yield row


if __name__ == "__main__":
    main()
