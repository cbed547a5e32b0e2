"""What every exercise is made of: inputs with bounds, a solution in steps, answers, and the mistakes people make."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError

from engine.errors import SpecError
from engine.result import RunResult
from engine.spec import RunSpec

Value = int | float | str
Inputs = Mapping[str, Any]
Unit = Literal["B", "s", "B/s", "ratio", "fraction", "layers", "tokens", "parameters", "FLOP"]


@dataclass(frozen=True, slots=True)
class Input:
    """One number or choice that the reader may change. `symbol` is its letter in the formulas."""

    name: str
    label: str
    default: Value
    help: str = ""
    symbol: str = ""
    minimum: float = 1
    maximum: float = 1
    choices: tuple[str, ...] = ()
    several: bool = False
    """Any subset of `choices`, written `one+two`; empty or `none` is no choice at all."""
    slider: bool = False

    @property
    def accepts(self) -> str:
        if self.choices:
            return f"{'any of' if self.several else 'one of'} {', '.join(self.choices)}"
        kind = "a whole number" if isinstance(self.default, int) else "a number"
        return f"{kind} from {self.minimum:,.10g} to {self.maximum:,.10g}"

    def parse(self, text: object) -> Value:
        """The value. Raises SpecError naming the input and what it accepts."""
        written = str(text).strip()
        refused = SpecError(self.name, f"{written[:40]!r} is not accepted: it must be {self.accepts}")
        if self.several:
            chosen = [] if written in ("", "none") else re.split(r"[+,\s]+", written)  # a URL's + is a space
            if set(chosen) - set(self.choices):
                raise refused
            return "+".join(choice for choice in self.choices if choice in chosen)
        if self.choices:
            if written not in self.choices:
                raise refused
            return written
        if not re.fullmatch(r"[-+0-9.eE]+", written):
            raise refused
        try:
            number = int(written) if isinstance(self.default, int) else float(written)
        except ValueError:
            raise refused from None
        if not self.minimum <= number <= self.maximum:  # false for NaN, and for infinities
            raise refused
        return number


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a derivation. `formula` is in plain notation (`k* = √(L·b/a) = 1.8`); the pages typeset it."""

    text: str
    formula: str = ""
    value: float | None = None
    unit: Unit | None = None


@dataclass(frozen=True, slots=True)
class Guess:
    """A number that readers give, and what to say about it."""

    value: float
    hint: str
    right: bool = False
    """Counts as right: the same quantity seen another way."""


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: tuple[tuple[float, float], ...]
    style: Literal["line", "dashed", "points", "hollow", "mark"] = "line"
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lines:
    """Curves over one axis."""

    title: str
    x_label: str
    y_label: str
    y_unit: Unit
    series: tuple[Series, ...]
    x_unit: Unit = "layers"
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Bars:
    """Stacked bars, one a row, on one scale; `limits` are lines across them."""

    title: str
    unit: Unit
    bars: tuple[Bar, ...]
    limits: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]
    units: tuple[Unit | None, ...]


@dataclass(frozen=True)
class Solution:
    """An exercise worked out for one set of inputs."""

    inputs: Inputs
    answers: dict[str, Any]
    steps: list[Step]
    notes: list[str]
    charts: list[Lines | Bars]
    spec: dict[str, Any]
    """What the prediction pages open: the exercise's own configuration."""
    small_spec: dict[str, Any]
    """The same question at a size that a CPU measures in a minute."""
    vary: dict[str, list[Any]]
    """What the benchmark of the small version compares."""
    tables: list[Table] = field(default_factory=list)
    guesses: dict[str, list[Guess]] = field(default_factory=dict)
    """By answer key: numbers that are near misses."""


@dataclass(frozen=True)
class Exercise:
    number: int
    name: str
    """One word for a tab."""
    title: str
    question: str
    inputs: tuple[Input, ...]
    asked: dict[str, str]
    """Answer key -> what the answer box asks for."""
    solve: Callable[[Inputs], Solution]
    objective: str = ""
    """The Learn page that explains it."""
    simulate: Callable[[Inputs, Callable[[RunSpec], RunResult]], Series] | None = None
    """Points for the first chart, each a simulation of the real model by the given function."""

    def parse(self, query: Mapping[str, Any]) -> dict[str, Value]:
        """Every input, from `query` or by default. Raises SpecError for an unknown name or a refused value."""
        known = {each.name: each for each in self.inputs}
        if unknown := [name for name in query if name not in known]:
            raise SpecError(str(unknown[0])[:40], f"no such input; exercise {self.number} takes {', '.join(known)}")
        return {name: each.parse(query.get(name, each.default)) for name, each in known.items()}


def build_spec(**fields: Any) -> RunSpec:
    """A RunSpec; what it refuses becomes a SpecError in the exercise's words."""
    try:
        return RunSpec(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ", ".join(str(part) for part in first["loc"]) or "inputs"
        raise SpecError(where, first["msg"].removeprefix("Value error, ")) from None


def compact(spec: RunSpec) -> dict[str, Any]:
    """The fields that differ from the defaults: what a link needs."""
    return spec.model_dump(exclude_defaults=True)


def saved_bytes(result: RunResult) -> int:
    assert result.memory.saved_activation_bytes is not None
    return result.memory.saved_activation_bytes


def peak_bytes(result: RunResult) -> int:
    assert result.memory.device_peak_bytes is not None
    return result.memory.device_peak_bytes


def number(value: float) -> str:
    """A number inside a formula: 167772160 -> '167,772,160', 1.83928 -> '1.839'."""
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def product(*factors: float) -> str:
    return "·".join(number(factor) for factor in factors)
