"""Exercise 2: the optimal checkpointing interval.

With a checkpoint every k layers, L/k inputs of b bytes wait for backward, and one segment of k layers, a bytes each,
is back at a time: peak(k) = (L/k)·b + k·a, least at k* = √(L·b/a) (derivative -L·b/k² + a = 0). The course's √L
(Chen et al. 2016, arXiv 1604.06174) is the case a = b.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from engine.closed_form import predict
from engine.closed_form.block import block_tape, context_of
from engine.closed_form.tape import total_bytes
from engine.errors import SpecError, UnsupportedError
from engine.exercises.exercise import (
    Exercise,
    Guess,
    Input,
    Inputs,
    Lines,
    Series,
    Solution,
    Step,
    build_spec,
    compact,
    number,
)
from engine.exercises.shapes import gpt_model, shape_inputs
from engine.result import RunResult
from engine.spec import RunSpec
from engine.units import format_bytes

VOCAB = 256
"""A small vocabulary: the logits would otherwise hide what the interval does to the blocks."""


def spec_of(inputs: Inputs, checkpointing: str = "per-layer") -> RunSpec:
    """Gradients are accumulated over two micro-batches, so that they are there all along and only activations move."""
    return build_spec(
        model=gpt_model(inputs, VOCAB),
        micro_batch=inputs["batch"],
        seq=inputs["seq"],
        attention=inputs["attention"],
        precision="bf16",
        grad_accumulation=2,
        checkpointing=checkpointing,
    )


def activation_peak(result: RunResult) -> int:
    """Bytes of activations and temporaries at the peak of a predicted, simulated or measured run."""
    assert result.memory.at_peak is not None
    return result.memory.at_peak.activations + result.memory.at_peak.temporaries


def formula_peak(layers: int, every: float, boundary: float, layer: float) -> float:
    """(L/k)·b + k·a, with L/k rounded up for a whole k."""
    return math.ceil(layers / every) * boundary + every * layer


@lru_cache(maxsize=64)
def _exact_curve(spec: RunSpecKey) -> tuple[int, ...]:
    layers, hidden, heads, batch, seq, attention = spec
    inputs = {"layers": layers, "hidden": hidden, "heads": heads, "batch": batch, "seq": seq, "attention": attention}
    return tuple(activation_peak(predict(spec_of(inputs, f"every-{k}"))) for k in range(1, layers + 1))


RunSpecKey = tuple[int, int, int, int, int, str]


def exact_curve(inputs: Inputs) -> tuple[int, ...]:
    """Predicted peak of activations for k = 1…L."""
    return _exact_curve(tuple(inputs[name] for name in ("layers", "hidden", "heads", "batch", "seq", "attention")))


def simulated_points(inputs: Inputs, simulate: Callable[[RunSpec], RunResult]) -> Series:
    """The real model simulated with k = 1, the best k and √L: few, for each takes seconds.

    Raises SpecError with a ratio of one's own, for which there is no model, and for a simulation that failed.
    """
    if inputs["ratio"] != 0:
        raise SpecError("ratio", "only a real block can be simulated: set it to 0")
    curve = exact_curve(inputs)
    chosen = sorted({1, curve.index(min(curve)) + 1, round(math.sqrt(inputs["layers"]))})
    results = {k: simulate(spec_of(inputs, f"every-{k}")) for k in chosen}
    if failed := [result for result in results.values() if result.memory.at_peak is None]:
        raise SpecError("simulate", failed[0].error or "the simulation knows no peak")
    peaks = tuple((k, activation_peak(result)) for k, result in results.items())
    return Series("Simulated", peaks, "hollow", tuple(f"simulated, k = {k}" for k in chosen))


def nested_peak(inputs: Inputs) -> int | None:
    """Predicted peak of activations with recursive checkpointing; None where the closed form does not know it."""
    try:
        return activation_peak(predict(spec_of(inputs, "nested")))
    except UnsupportedError:
        return None


def solve(inputs: Inputs) -> Solution:
    layers, ratio = inputs["layers"], inputs["ratio"]
    tape = block_tape(context_of(spec_of(inputs)))
    boundary = next(iter(tape.inputs.values())).bytes
    real = ratio == 0
    layer = total_bytes(tape.saved.values()) if real else round(ratio * boundary)
    intervals = range(1, layers + 1)
    by_formula = [formula_peak(layers, k, boundary, layer) for k in intervals]
    exact = exact_curve(inputs) if real else None
    peaks = by_formula if exact is None else exact
    minimum = min(peaks)
    discrete = peaks.index(minimum) + 1
    formula_discrete = by_formula.index(min(by_formula)) + 1
    root, best = math.sqrt(layers), math.sqrt(layers * boundary / layer)
    nested = nested_peak(inputs) if real else None
    course = peaks[round(root) - 1]
    steps = [
        Step("The input of a layer, which a checkpoint keeps.", "b = B·S·d·2", boundary, "B"),
        Step(
            "What a layer holds while its backward runs"
            + (": the sum of its saved tensors." if real else ": the ratio you chose times b."),
            f"a = {number(round(layer / boundary, 3))}·b",
            layer,
            "B",
        ),
        Step(
            "A checkpoint every k layers keeps L/k inputs, and holds one segment of k layers again at a time. The "
            "segment's own input is counted in both, one b too many, which moves no minimum.",
            "peak(k) = (L/k)·b + k·a",
        ),
        Step("At the minimum the derivative is zero.", "-L·b/k^2 + a = 0"),
        Step(
            "The second derivative is 2·L·b/k³ > 0, so this is the minimum, not a maximum.",
            f"k* = √(L·b/a) = √({layers}/{number(round(layer / boundary, 3))})",
            best,
            "layers",
        ),
        Step(
            "The notes take a = b: a layer that holds no more than its input. Then k* is the square root of L.",
            f"√L = √{layers}",
            root,
            "layers",
        ),
        Step(
            "Only whole intervals exist; trying all of them"
            + (" with the predictor, gradients in flight included:" if real else " in the formula:"),
            f"peak({discrete})",
            minimum,
            "B",
        ),
        Step("At the notes' interval the same model needs", f"peak({round(root)})", course, "B"),
    ]
    if nested is not None:
        steps.append(
            Step("One step beyond: checkpoints inside checkpoints need O(log L) inputs.", "peak(nested)", nested, "B")
        )
    series = [
        Series("Rule: a = b", tuple((k, formula_peak(layers, k, boundary, boundary)) for k in intervals), "dashed"),
        Series("(L/k)·b + k·a", tuple(zip(intervals, by_formula, strict=True)), "line"),
    ]
    if exact is not None:
        series.append(Series("Predicted, exact", tuple(zip(intervals, exact, strict=True)), "points"))
    series.append(Series("Minimum", ((discrete, minimum),), "mark", (f"k = {discrete}",)))
    series.append(Series("√L", ((round(root), course),), "mark", (f"√L ≈ {round(root)}",)))
    if nested is not None:
        series.append(Series("Nested", ((1, nested), (layers, nested)), "dashed", ("nested",)))
    return Solution(
        inputs=inputs,
        answers={"sqrt_k": root, "exact_k": best, "discrete_k": discrete, "minimum_bytes": minimum},
        steps=steps,
        notes=_notes(inputs, real, layer / boundary, course, minimum, discrete, formula_discrete),
        charts=[
            Lines(
                "Peak activations against the interval",
                "Layers in a segment, k",
                "Peak activations",
                "B",
                tuple(series),
                log_x=True,
                log_y=True,
            )
        ],
        spec=compact(spec_of(inputs, f"every-{discrete}")),
        small_spec={"model": "gpt:16,256,4", "seq": 512, "micro_batch": 2, "precision": "fp32", "device": "cpu"},
        vary={"checkpointing": ["none", "per-layer", "every-2", "sqrt", "every-8", "nested"]},
        guesses={
            "sqrt_k": [Guess(best, "That is k* for the real block; here the notes' a = b is asked for.")],
            "exact_k": [
                Guess(root, "That is √L, which assumes a = b: divide L by a/b under the root."),
                Guess(math.sqrt(layers * layer / boundary), "The ratio is upside down: it is √(L·b/a)."),
                Guess(layers * boundary / layer, "The square root is missing."),
            ],
            "discrete_k": [
                Guess(round(root), "That is √L; a real layer holds more than its input, so the best interval is less.")
            ],
            "minimum_bytes": [
                Guess(min(by_formula), "Right by the formula; the predictor adds the gradients in flight.", right=True),
                Guess(course, "That is the peak at √L, not at the minimum."),
                Guess(layers * boundary, "Only the checkpoints are counted: one segment is held again in backward."),
                Guess(layer, "Only one layer is counted: the L/k checkpoints wait meanwhile."),
            ],
        },
    )


def _notes(
    inputs: Inputs, real: bool, ratio: float, course: float, minimum: float, discrete: int, formula_discrete: int
) -> list[str]:
    notes = [
        f"√L is the minimum only if a layer holds as much as its input (a = b). Here a is {number(round(ratio, 2))} "
        f"times b, so at √L the peak is {format_bytes(course)}, {course / minimum:.2f} times the minimum of "
        f"{format_bytes(minimum)}."
    ]
    if ratio >= inputs["layers"]:
        notes.append("a/b is at least L, so k* is below 1: a checkpoint at every layer is the least memory there is.")
    if real and discrete != formula_discrete:
        notes.append(
            f"The bare formula would choose k = {formula_discrete}; with the gradients in flight during a layer's "
            f"backward counted, k = {discrete} is less."
        )
    if not real:
        notes.append("With your own a/b there is no real block to predict: the points come from the formula alone.")
    return notes


EXERCISE = Exercise(
    number=2,
    name="Interval",
    title="The optimal checkpointing interval",
    question="A checkpoint is kept every k layers of a model with L layers. Which k needs the least memory, why, and "
    "what does the square-root rule of the notes assume that a real transformer block does not keep?",
    inputs=(
        Input("layers", "Layers", 64, "", "L", 1, 256, slider=True),
        Input(
            "ratio", "a/b of your own", 0.0, "0 = the real block below; 1 is the notes' assumption", "a/b", 0, 200,
            slider=True,
        ),
        *shape_inputs(hidden=1024, heads=16, batch=4, seq=1024),
        Input("attention", "Attention", "flash", "standard: a layer holds more", choices=("flash", "standard")),
    ),
    asked={
        "sqrt_k": "The interval by the square-root rule",
        "exact_k": "The continuous optimum k*",
        "discrete_k": "The best whole interval",
        "minimum_bytes": "Peak activations at the best interval",
    },
    solve=solve,
    simulate=simulated_points,
    objective="sqrt",
)  # fmt: skip
