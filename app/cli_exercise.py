"""`remat exercise N`: an exercise worked out on the terminal, or a reader's answer checked."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated

import typer

from engine.errors import SpecError
from engine.exercises import EXERCISES, check_answer, exercise, solve
from engine.exercises.checking import describe

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""The flags are the exercise's inputs: which there are depends on its number."""

WRONG = 1


def work_out(
    context: typer.Context,
    number: Annotated[int, typer.Argument(help="1 to 5.")],
    answer: Annotated[str | None, typer.Option(help="Check this answer instead; exit 1 unless it is right.")] = None,
    key: Annotated[str | None, typer.Option(help="Which answer it is, as in --json; without it, any of them.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document, as GET /api/v1/exercises/N.")] = False,
) -> None:
    """Work an exercise out; its inputs are flags (`remat exercise 1 --layers 40 --batch 4`)."""
    inputs = flags(context.args)
    if answer is not None:
        found = check_answer(number, inputs, answer, key)
        document = {"correct": found.correct, "verdict": found.verdict, "key": found.key, "hint": found.hint}
        print(json.dumps(document) if as_json else found.hint)
        raise typer.Exit(0 if found.correct else WRONG)
    solution = solve(number, inputs)
    if as_json:
        from app.api.exercises import view

        print(view(solution).model_dump_json())
        return
    print(f"{exercise(number).title}\n\n{exercise(number).question}\n")
    print("  ".join(f"{name}={value}" for name, value in solution.inputs.items()), end="\n\n")
    for position, step in enumerate(solution.steps, 1):
        value = "" if step.value is None else f"= {_shown(step.value, step.unit)}"
        print(f"{position:2}. {step.text}\n    {step.formula} {value}".rstrip())
    print()
    for name, found_value in solution.answers.items():
        shown = describe(name, found_value) if isinstance(found_value, int | float) else f"{len(found_value)} entries"
        print(f"{EXERCISES[number].asked[name]}: {shown}")
    for note in solution.notes:
        print(f"\n{note}")


def _shown(value: float, unit: str | None) -> str:
    kind = {"B": "step_bytes", "s": "step_seconds"}.get(unit or "", "step")
    return describe(kind, value) + (f" {unit}" if unit in ("layers", "tokens", "parameters") else "")


def flags(words: Iterable[str]) -> dict[str, str]:
    """`--micro-batch 4 --seq=512` to {"micro_batch": "4", "seq": "512"}. Raises SpecError for what is no flag."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise SpecError(word[:40], "inputs are flags: --name value")
        name, equals, value = word[2:].partition("=")
        if not equals:
            if not rest:
                raise SpecError(name[:40], "needs a value")
            value = rest.pop(0)
        if name.replace("-", "_") in found:
            raise SpecError(name[:40], "is given twice")
        found[name.replace("-", "_")] = value
    return found
