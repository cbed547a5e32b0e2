"""Exercise 4: a 7B model at S = 8192: standard attention without checkpointing, flash attention with it."""

from __future__ import annotations

from functools import lru_cache

from engine.architecture import Architecture, resolve_model
from engine.catalog import gpu
from engine.closed_form import predict
from engine.exercises.exercise import (
    Bar,
    Bars,
    Exercise,
    Guess,
    Input,
    Inputs,
    Solution,
    Step,
    Table,
    build_spec,
    compact,
    number,
    peak_bytes,
    product,
)
from engine.exercises.shapes import shape_inputs
from engine.planning import largest_seq, limits
from engine.recipes import DTYPE_BYTES, RECIPES
from engine.result import CATEGORIES, RunResult
from engine.spec import RunSpec
from engine.units import GIB, format_bytes

CARDS = {24: "rtx-4090", 40: "a100-40gb", 80: "a100-80gb-sxm"}
"""GiB -> the card of the catalog whose usable memory is the limit."""
MODELS = ("llama-7b", "llama-2-7b", "mistral-7b-v0.1", "llama-3.1-8b", "llama-tiny")
HOST_GIB = 512
"""Host memory for an offloaded optimizer: more than any model here needs."""
SIDES = {
    "a": ("standard, no checkpointing", {"attention": "standard", "checkpointing": "none"}),
    "b": ("flash, every layer checkpointed", {"attention": "flash", "checkpointing": "per-layer"}),
}


def spec_of(inputs: Inputs, side: str, **changes: object) -> RunSpec:
    fields: dict[str, object] = {
        "model": inputs["model"],
        "micro_batch": inputs["batch"],
        "seq": inputs["seq"],
        "precision": inputs["precision"],
        "offload_optimizer": inputs["offload_optimizer"],
    }
    return build_spec(**(fields | SIDES[side][1] | changes))


@lru_cache(maxsize=512)
def _longest(model: str, batch: int, precision: str, offload: str, side: str, card: str) -> int:
    inputs = {"model": model, "batch": batch, "seq": 1, "precision": precision, "offload_optimizer": offload}
    return largest_seq(spec_of(inputs, side, gpu=card), limits(card, 1, HOST_GIB, 0), step=1)


def longest_sequence(inputs: Inputs, side: str, card: str) -> int:
    """The largest S that fits the card by prediction; 0 if none does."""
    return _longest(inputs["model"], inputs["batch"], inputs["precision"], inputs["offload_optimizer"], side, card)


def _bar(label: str, result: RunResult) -> Bar:
    assert result.memory.at_peak is not None
    return Bar(label, tuple((category, getattr(result.memory.at_peak, category)) for category in CATEGORIES))


def _steps(inputs: Inputs, arch: Architecture, results: dict[str, RunResult]) -> list[Step]:
    recipe = RECIPES[inputs["precision"]]
    size, batch, seq = DTYPE_BYTES[recipe.compute], inputs["batch"], inputs["seq"]
    a, b = (results[side].memory for side in "ab")
    assert a.at_peak is not None
    assert b.at_peak is not None
    scores = size * batch * arch.heads * seq**2
    peaks = [peak_bytes(results[side]) for side in "ab"]
    return [
        Step("Parameters of the model.", "N", arch.parameters, "parameters"),
        Step(
            f"Weights on the device, {DTYPE_BYTES[recipe.weight]} bytes a parameter, and the rotary tables.",
            f"{DTYPE_BYTES[recipe.weight]}·N",
            a.at_peak.parameters,
            "B",
        ),
        Step(
            "Optimizer states on the device"
            + (": none, they are on the host." if a.at_peak.optimizer_states == 0 else "."),
            "master copy + two moments",
            a.at_peak.optimizer_states,
            "B",
        ),
        Step(
            "Standard attention: one S×S tensor of one layer. Each layer keeps its softmax, and at the peak the scores "
            "beside it.",
            f"{size}·B·H·S^2 = {product(size, batch, arch.heads, seq, seq)}",
            scores,
            "B",
        ),
        Step(
            "All layers keep theirs.", f"L·{size}·B·H·S^2 = {arch.layers}·{number(scores)}", arch.layers * scores, "B"
        ),
        Step("(a) Everything kept for backward, scores included.", "M_saved", a.saved_activation_bytes, "B"),
        Step("(a) Peak of the step, all categories.", "M_a", peaks[0], "B"),
        Step(
            "(b) Flash attention keeps no S×S tensor, and a checkpointed layer keeps only its input.",
            f"L·{size}·B·S·d = {product(arch.layers, size, batch, seq, arch.hidden)}",
            arch.layers * size * batch * seq * arch.hidden,
            "B",
        ),
        Step(f"(b) Peak of the step; it falls in the {b.peak_phase} phase.", "M_b", peaks[1], "B"),
        Step("Ratio.", "M_a / M_b", peaks[0] / peaks[1], "ratio"),
    ]


def solve(inputs: Inputs) -> Solution:
    arch = resolve_model(inputs["model"])
    results = {side: predict(spec_of(inputs, side)) for side in SIDES}
    standard, flash = (peak_bytes(results[side]) for side in "ab")
    longest: list[tuple[str | float | None, ...]] = [
        (
            f"{SIDES[side][0]}{where}",
            *(longest_sequence(placed, side, card) or "does not fit" for card in CARDS.values()),
        )
        for where, placed in (
            ("", {**inputs, "offload_optimizer": "none"}),
            (", optimizer on the CPU", {**inputs, "offload_optimizer": "cpu"}),
        )
        for side in SIDES
    ]
    recipe_bytes = {name: _states_per_parameter(name) for name in RECIPES}
    fp32 = [peak_bytes(predict(spec_of(inputs, side, precision="fp32"))) for side in "ab"]
    swapped = [
        peak_bytes(predict(spec_of(inputs, "a", attention="flash"))),
        peak_bytes(predict(spec_of(inputs, "b", attention="standard"))),
    ]
    arch_scores = DTYPE_BYTES[RECIPES[inputs["precision"]].compute] * inputs["batch"] * arch.heads * inputs["seq"] ** 2
    notes = [
        "The notes count 12 bytes a parameter (bf16-12: weights, gradients, two fp32 moments) and the S×S scores of "
        f"one layer; this is {inputs['precision']}, {recipe_bytes[inputs['precision']]} bytes a parameter, and every "
        "layer keeps its own scores. Set the precision to bf16-12 to have the notes' recipe.",
        f"Flash without checkpointing would peak at {format_bytes(swapped[0])}, checkpointing without flash at "
        f"{format_bytes(swapped[1])}: the two techniques remove different tensors.",
    ]
    if all(cell == "does not fit" for row in longest[:2] for cell in row[1:]):
        notes.append(
            "With everything on the card no length fits any of the three: weights, gradients and optimizer states "
            "alone are larger. With the optimizer on the CPU, or a leaner precision, the table below fills."
        )
    return Solution(
        inputs=inputs,
        answers={
            "standard_none_bytes": standard,
            "flash_checkpointed_bytes": flash,
            "ratio": standard / flash,
        },
        steps=_steps(inputs, arch, results),
        notes=notes,
        charts=[
            Bars(
                "Peak memory by category",
                "B",
                tuple(_bar(SIDES[side][0], results[side]) for side in SIDES),
                tuple((f"{size} GiB", size * GIB) for size in CARDS),
            )
        ],
        tables=[
            Table(
                "Longest sequence that fits",
                ("Configuration", *(f"{size} GiB, {gpu(card).name}" for size, card in CARDS.items())),
                tuple(longest),
                (None, "tokens", "tokens", "tokens"),
            )
        ],
        spec=compact(spec_of(inputs, "b")),
        small_spec={"model": "llama-tiny", "seq": 2048, "precision": "fp32", "device": "cpu"},
        vary={"attention": ["standard", "flash"], "checkpointing": ["none", "per-layer"]},
        guesses={
            "standard_none_bytes": [
                Guess(fp32[0], "That is the fp32 answer: check the precision."),
                Guess(
                    swapped[0], "That is without the S×S tensors: standard attention keeps the softmax of every head."
                ),
                Guess(
                    standard - (arch.layers - 1) * arch_scores,
                    "The scores of one layer only: every layer keeps its own.",
                ),
                Guess(results["a"].memory.saved_activation_bytes or 0, "Those are the activations alone."),
                Guess(flash, "That is (b)."),
            ],
            "flash_checkpointed_bytes": [
                Guess(fp32[1], "That is the fp32 answer: check the precision."),
                Guess(swapped[1], "That is checkpointing with standard attention."),
                Guess(swapped[0], "That is flash attention without checkpointing."),
                Guess(standard, "That is (a)."),
            ],
            "ratio": [Guess(flash / standard, "Upside down: divide (a) by (b).")],
        },
    )


def _states_per_parameter(precision: str) -> int:
    recipe = RECIPES[precision]
    return 2 * DTYPE_BYTES[recipe.weight] + 2 * DTYPE_BYTES[recipe.moment] + 4 * recipe.master


EXERCISE = Exercise(
    number=4,
    name="Sequence",
    title="7B at 8192 tokens",
    question="A 7B model is trained on sequences of 8192 tokens. What is the peak memory (a) with standard attention "
    "and no checkpointing, (b) with flash attention and a checkpoint at every layer, category by category, and how "
    "long a sequence does a card of 24, 40 or 80 GiB take with each?",
    inputs=(
        Input("model", "Model", "llama-2-7b", "", choices=MODELS),
        *shape_inputs(batch=1, seq=8192),
        Input(
            "precision", "Precision", "bf16-mixed", "16, 12, 8 or 16 bytes a parameter",
            choices=("bf16-mixed", "bf16-12", "bf16", "fp32"),
        ),
        Input("offload_optimizer", "Optimizer", "none", "cpu = its states in host memory", choices=("none", "cpu")),
    ),
    asked={
        "standard_none_bytes": "(a) Peak with standard attention, nothing checkpointed",
        "flash_checkpointed_bytes": "(b) Peak with flash attention, every layer checkpointed",
        "ratio": "Ratio of (a) to (b)",
    },
    solve=solve,
    objective="flash",
)  # fmt: skip
