"""Exercise 5: design a selective recomputation strategy: which op groups to store, which to run again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from engine.checkpoint_names import OP_GROUPS
from engine.closed_form import predict
from engine.exercises.exercise import (
    Exercise,
    Guess,
    Input,
    Inputs,
    Lines,
    Series,
    Solution,
    Step,
    Table,
    build_spec,
    compact,
    number,
    saved_bytes,
)
from engine.exercises.shapes import gpt_model, shape_inputs
from engine.planning import pareto
from engine.spec import RunSpec
from engine.units import format_bytes

GPU = "a100-80gb-sxm"
"""Whose rates the predicted seconds refer to."""


@dataclass(frozen=True, slots=True)
class Cost:
    """A strategy's price: bytes that `none` keeps and this does not, and the step's extra time."""

    groups: tuple[str, ...]
    saved_bytes: int
    overhead_fraction: float
    flops_fraction: float

    @property
    def name(self) -> str:
        return "+".join(self.groups) or "none"


def spec_of(inputs: Inputs, groups: Iterable[str] = ()) -> RunSpec:
    chosen = "+".join(groups)
    return build_spec(
        model=gpt_model(inputs),
        micro_batch=inputs["batch"],
        seq=inputs["seq"],
        attention=inputs["attention"],
        dropout=inputs["dropout"],
        checkpointing=f"selective:{chosen}" if chosen else "none",
        gpu=GPU,
    )


def groups_of(inputs: Inputs) -> tuple[str, ...]:
    """The op groups that the model has; without dropout there is nothing of it to recompute."""
    return tuple(group for group in OP_GROUPS if group != "dropout" or inputs["dropout"] > 0)


@lru_cache(maxsize=4096)
def _price(spec: RunSpec) -> tuple[int, float, int, int]:
    result = predict(spec)
    timing = result.timing
    assert timing.step_seconds is not None
    assert timing.hardware_flops is not None
    assert timing.model_flops is not None
    return saved_bytes(result), timing.step_seconds, timing.hardware_flops, timing.model_flops


def cost(inputs: Inputs, groups: Iterable[str]) -> Cost:
    """What recomputing `groups` saves and costs, against storing everything."""
    chosen = tuple(groups)
    kept, seconds, flops, model_flops = _price(spec_of(inputs, chosen))
    all_kept, fastest, _, _ = _price(spec_of(inputs))
    return Cost(chosen, all_kept - kept, seconds / fastest - 1, flops / model_flops - 1)


def strategies(inputs: Inputs) -> list[Cost]:
    """Every subset of the op groups."""
    known = groups_of(inputs)
    return [cost(inputs, chosen) for size in range(len(known) + 1) for chosen in combinations(known, size)]


def frontier(costs: Iterable[Cost]) -> list[Cost]:
    """The strategies that no other beats in both memory and time, cheapest first; of equals, the simplest."""
    known = sorted(costs, key=lambda c: len(c.groups))
    edge = [known[index] for index in pareto([(c.overhead_fraction, c.saved_bytes) for c in known])]
    return sorted(edge, key=lambda c: c.overhead_fraction)


def solve(inputs: Inputs) -> Solution:
    chosen = tuple(inputs["recompute"].split("+")) if inputs["recompute"] else ()
    chosen = tuple(group for group in chosen if group in groups_of(inputs))
    everything = strategies(inputs)
    edge = frontier(everything)
    mine = cost(inputs, chosen)
    allowed = inputs["max_overhead"] / 100
    best = max((c for c in edge if c.overhead_fraction <= allowed), key=lambda c: c.saved_bytes)
    none_bytes, none_seconds, _, _ = _price(spec_of(inputs))
    my_seconds = _price(spec_of(inputs, chosen))[1]
    alone = [cost(inputs, (group,)) for group in groups_of(inputs)]
    attention = next(c for c in alone if c.groups == ("attention-core",))
    steps = [
        Step("Stored for backward when nothing is recomputed.", "M", none_bytes, "B"),
        Step(f"Stored under your strategy, which recomputes {mine.name}.", "M_s", none_bytes - mine.saved_bytes, "B"),
        Step("Saved.", "M - M_s", mine.saved_bytes, "B"),
        Step("A step when nothing is recomputed (predicted for an A100).", "t", none_seconds, "s"),
        Step("A step under your strategy.", "t_s", my_seconds, "s"),
        Step("Overhead in time.", "(t_s - t)/t", mine.overhead_fraction, "fraction"),
        Step(
            "Overhead in matrix FLOPs: norms, activations and dropout cost memory traffic instead.",
            "(F_s - F)/F",
            mine.flops_fraction,
            "fraction",
        ),
        Step(
            f"The best strategy within {number(inputs['max_overhead'])} % recomputes {best.name}: for "
            f"{number(round(100 * best.overhead_fraction, 2))} % more time it saves",
            "M - M_best",
            best.saved_bytes,
            "B",
        ),
    ]
    short = mine.overhead_fraction <= allowed and best.saved_bytes > mine.saved_bytes
    notes = [
        "The notes keep the attention scores, as expensive to make, and recompute the projections. Korthikanti et al. "
        f"2022 recompute exactly the scores: here that alone saves {format_bytes(attention.saved_bytes)} for "
        f"{100 * attention.overhead_fraction:.2f} % more time. Large and cheap per byte is what to recompute, whatever "
        "its name.",
        "Groups are not independent: recomputing a group needs its inputs, so a tensor may stay only because the next "
        "group is made again from it. That is why the frontier is searched over all subsets, not added up.",
    ]
    if inputs["attention"] == "flash":
        notes.append(
            "With flash attention there are no scores to drop: recomputing attention-core saves little more than the "
            "kernel's output and costs a whole attention forward."
        )
    if short:
        notes.insert(
            0, f"Within the same overhead {best.name} saves {format_bytes(best.saved_bytes)}, more than yours."
        )
    table = Table(
        "What each group is worth on its own",
        ("Op group", "What it is", "Saved", "Time added", "Saved per second"),
        tuple(
            (
                c.name, OP_GROUPS[c.name], c.saved_bytes, c.overhead_fraction,
                c.saved_bytes / (c.overhead_fraction * none_seconds) if c.overhead_fraction > 1e-9 else None,
            )
            for c in sorted(alone, key=lambda c: -c.saved_bytes)
        ),
        (None, None, "B", "fraction", "B/s"),
    )  # fmt: skip
    return Solution(
        inputs=inputs,
        answers={
            "saved_bytes": mine.saved_bytes,
            "overhead_fraction": mine.overhead_fraction,
            "frontier": [
                {
                    "recompute": list(c.groups),
                    "saved_bytes": c.saved_bytes,
                    "overhead_fraction": c.overhead_fraction,
                }
                for c in edge
            ],
        },
        steps=steps,
        notes=notes,
        charts=[_chart(everything, edge, mine, best)],
        tables=[table],
        spec=compact(spec_of(inputs, chosen)),
        small_spec={
            "model": "gpt:4,512,8", "seq": 1024, "micro_batch": 2, "precision": "fp32", "device": "cpu",
            "attention": inputs["attention"],
        },
        vary={"checkpointing": list(dict.fromkeys(["none", "per-layer", _policy(chosen), _policy(best.groups)]))},
        guesses={
            "saved_bytes": [
                Guess(none_bytes - mine.saved_bytes, "That is what is still stored: subtract it from the whole."),
                Guess(mine.saved_bytes / inputs["layers"], "That is one layer: multiply by the number of layers."),
            ],
            "overhead_fraction": [
                Guess(100 * mine.overhead_fraction, "That is in percent: write the % sign, or a fraction."),
                Guess(1 + mine.overhead_fraction, "That is the ratio of the times: subtract one."),
                Guess(mine.flops_fraction, "That is the share of FLOPs: norms and activations cost traffic."),
            ],
        },
    )  # fmt: skip


def _policy(groups: tuple[str, ...]) -> str:
    return f"selective:{'+'.join(groups)}" if groups else "none"


def _chart(everything: list[Cost], edge: list[Cost], mine: Cost, best: Cost) -> Lines:
    def points(costs: Iterable[Cost]) -> tuple[tuple[float, float], ...]:
        return tuple((c.overhead_fraction, c.saved_bytes) for c in costs)

    def names(costs: Iterable[Cost]) -> tuple[str, ...]:
        return tuple(c.name for c in costs)

    return Lines(
        "Memory saved against time added",
        "Time added to a step",
        "Activation memory saved",
        "B",
        (
            Series("Every strategy", points(everything), "points", names(everything)),
            Series("Frontier", points(edge), "line"),
            Series("On the frontier", points(edge), "hollow", names(edge)),
            Series("Best within your limit", points([best]), "mark", ("best in limit",)),
            Series("Yours", points([mine]), "mark", ("yours",)),
        ),
        x_unit="fraction",
    )


EXERCISE = Exercise(
    number=5,
    name="Selective",
    title="A selective strategy of your own",
    question="A GPT-style model is trained with selective recomputation. Choose, op group by op group, what is stored "
    "for backward and what is computed again. How much activation memory does your strategy save, what does it add to "
    "a step, and what is the best that can be had for that overhead?",
    inputs=(
        Input(
            "recompute", "Recompute", "norms+attention-core+mlp-activation",
            "ticked: run again in backward; not ticked: stored", choices=tuple(OP_GROUPS), several=True,
        ),
        Input("max_overhead", "Overhead allowed, %", 5.0, "draws the best within it", "", 0, 100, slider=True),
        *shape_inputs(layers=24, hidden=2048, heads=16, vocab=50_257, batch=4, seq=2048),
        Input("dropout", "Dropout", 0.1, "its masks are a group too", "p", 0, 0.9),
        Input("attention", "Attention", "standard", "flash has no scores to drop", choices=("standard", "flash")),
    ),
    asked={
        "saved_bytes": "Activation memory saved by your strategy",
        "overhead_fraction": "Time added to a step",
        "frontier": "Strategies that nothing beats",
    },
    solve=solve,
    objective="selective",
)  # fmt: skip
