"""Exercise 1: activation memory of LLaMA-13B with and without checkpointing."""

from __future__ import annotations

from engine.closed_form import predict
from engine.closed_form.block import block_tape, context_of
from engine.closed_form.tape import total_bytes
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
    product,
    saved_bytes,
)
from engine.exercises.shapes import llama_model, shape_inputs
from engine.recipes import DTYPE_BYTES, RECIPES
from engine.spec import RunSpec
from engine.units import format_bytes

NOTES_BYTES_PER_ELEMENT = 28
"""The notes' 120 GB for a 7B model at B=8, S=4096: 120e9 / (32 layers · 8 · 4096 · 4096) bytes."""


def spec_of(inputs: Inputs, **changes: object) -> RunSpec:
    fields = {
        "model": llama_model(inputs),
        "micro_batch": inputs["batch"],
        "seq": inputs["seq"],
        "attention": inputs["attention"],
        "precision": inputs["precision"],
    }
    return build_spec(**(fields | changes))


def _bar(inputs: Inputs, attention: str, checkpointing: str) -> Bar:
    """What is saved, split into layer inputs, S×S tensors, other block tensors and what lies outside the blocks."""
    spec = spec_of(inputs, attention=attention, checkpointing=checkpointing)
    tape, layers = block_tape(context_of(spec)), inputs["layers"]
    boundary = layers * next(iter(tape.inputs.values())).bytes
    whole = saved_bytes(predict(spec))
    inside = layers * total_bytes(tape.saved.values()) if checkpointing == "none" else boundary
    square = (inputs["seq"], inputs["seq"])
    scores = layers * total_bytes(t for t in tape.saved.values() if t.shape[-2:] == square and len(t.shape) == 4)
    scores = scores if checkpointing == "none" else 0
    return Bar(
        f"{attention} attention, {checkpointing}",
        (
            ("Layer inputs", boundary),
            ("Attention scores", scores),
            ("Other block tensors", inside - boundary - scores),
            ("Outside the blocks", whole - inside),
        ),
    )


def solve(inputs: Inputs) -> Solution:
    spec = spec_of(inputs)
    layers, batch, seq, hidden = (inputs[name] for name in ("layers", "batch", "seq", "hidden"))
    size = DTYPE_BYTES[RECIPES[inputs["precision"]].compute]
    tape = block_tape(context_of(spec))
    boundary = next(iter(tape.inputs.values())).bytes
    layer = total_bytes(tape.saved.values())
    none, per_layer = (saved_bytes(predict(spec_of(inputs, checkpointing=policy))) for policy in ("none", "per-layer"))
    outside = none - layers * layer
    elements = batch * seq * hidden
    rule = NOTES_BYTES_PER_ELEMENT * elements * layers
    other_attention = "standard" if inputs["attention"] == "flash" else "flash"
    other_precision = "fp32" if inputs["precision"] != "fp32" else "bf16-mixed"
    other = saved_bytes(predict(spec_of(inputs, attention=other_attention)))
    steps = [
        Step(
            f"The input of one layer is a (B, S, d) tensor of {size} bytes an element.",
            f"b = B·S·d·{size} = {product(batch, seq, hidden, size)}",
            boundary,
            "B",
        ),
        Step(
            f"Without checkpointing a layer keeps everything its backward reads: the {len(tape.saved)} tensors of the "
            "table below.",
            f"A_l = {number(round(layer / elements, 2))}·B·S·d",
            layer,
            "B",
        ),
        Step("All layers keep their own.", f"L·A_l = {product(layers, layer)}", layers * layer, "B"),
        Step(
            "Outside the blocks: what the embedding, the final norm and the loss keep. It is there with and without "
            "checkpointing, so it is counted apart.",
            "O",
            outside,
            "B",
        ),
        Step(
            "The logits are apart too: the loss here takes its gradient while forward runs, so they live for a moment "
            "and nothing of their size waits for backward. Plain cross-entropy would keep their fp32 log-softmax.",
            f"4·B·S·V = {product(4, batch, seq, inputs['vocab'])}",
            4 * batch * seq * inputs["vocab"],
            "B",
        ),
        Step("Without checkpointing:", "M_none = L·A_l + O", none, "B"),
        Step(
            "With a checkpoint at every layer only its input stays; the inside is recomputed in backward, one layer at "
            "a time.",
            f"M_ckpt = L·b + O = {product(layers, boundary)} + {number(per_layer - layers * boundary)}",
            per_layer,
            "B",
        ),
        Step(
            "So checkpointing divides the activations kept for backward by",
            "M_none / M_ckpt",
            none / per_layer,
            "ratio",
        ),
        Step(
            "For a moment of backward one whole layer is back, so the activations alive at that moment reach "
            "(gradients in flight not counted)",
            "M_ckpt + A_l",
            per_layer + layer,
            "B",
        ),
    ]
    notes = [
        f"The notes' rule of thumb is {NOTES_BYTES_PER_ELEMENT} bytes for each of L·B·S·d (their 120 GB for a 7B model "
        f"at B=8, S=4096), here {format_bytes(rule)}. The exact sum for this block is {number(layer / elements)} "
        "bytes: it follows the FFN width, the key/value heads and the kernel, which the rule folds into one constant.",
        f"With {other_attention} attention instead, nothing checkpointed, the model would keep {format_bytes(other)}: "
        "the S×S softmax of every head is the difference, and per-layer checkpointing drops it either way.",
    ]
    guesses = {
        "no_checkpointing_bytes": [
            Guess(layers * layer, "Right for the blocks alone; norm and loss add the rest.", right=True),
            Guess(layer, "That is one layer: multiply by the number of layers."),
            Guess(layer + outside, "Only one layer is counted: multiply its tensors by the number of layers."),
            Guess(
                saved_bytes(predict(spec_of(inputs, precision=other_precision))),
                f"That is the answer for {other_precision}: check the bytes of an element.",
            ),
            Guess(other, f"That is the answer with {other_attention} attention."),
            Guess(none / batch, "That is one sequence: multiply by the micro-batch."),
            Guess(
                rule, "That is the notes' rule of thumb; the exact sum over this block's tensors differs: see step 2."
            ),
        ],
        "per_layer_bytes": [
            Guess(layers * boundary, "Right for the layer inputs alone; norm and loss add the rest.", right=True),
            Guess(boundary, "That is one layer's input: every layer keeps its own."),
            Guess(
                2 * layers * boundary if size == 2 else layers * boundary / 2,
                f"Check the bytes of an element: {inputs['precision']} stores {size}.",
            ),
            Guess(per_layer + layer, "That is the peak during backward, one recomputed layer included."),
            Guess(per_layer / batch, "That is one sequence: multiply by the micro-batch."),
        ],
        "ratio": [
            Guess(layer / boundary, "Right for the blocks alone; the rest is in both totals.", right=True),
            Guess(per_layer / none, "Upside down: divide the larger by the smaller."),
        ],
    }
    bars = tuple(_bar(inputs, a, c) for a in ("flash", "standard") for c in ("none", "per-layer"))
    table = Table(
        "What one layer keeps for backward",
        ("Tensor", "Group", "Shape", "Type", "Bytes", "Bytes per B·S·d"),
        tuple(
            (t.name, t.group, "×".join(map(str, t.shape)), t.dtype, t.bytes, t.bytes / elements)
            for t in tape.saved.values()
        ),
        (None, None, None, None, "B", "ratio"),
    )
    return Solution(
        inputs=inputs,
        answers={"no_checkpointing_bytes": none, "per_layer_bytes": per_layer, "ratio": none / per_layer},
        steps=steps,
        notes=notes,
        charts=[Bars("Activations kept for backward", "B", bars)],
        tables=[table],
        spec=compact(spec),
        small_spec={"model": "llama-tiny", "seq": 1024, "micro_batch": 4, "precision": "fp32", "device": "cpu"},
        vary={"checkpointing": ["none", "per-layer"], "attention": ["flash", "standard"]},
        guesses=guesses,
    )


EXERCISE = Exercise(
    number=1,
    name="Activations",
    title="Activations of LLaMA-13B",
    question="LLaMA-13B has 40 layers and a hidden size of 5120. Train it on micro-batches of 4 sequences of 4096 "
    "tokens: how many bytes of activations wait for backward without checkpointing, how many with a checkpoint at "
    "every layer, and what is the ratio?",
    inputs=(
        *shape_inputs(
            layers=40, hidden=5120, heads=40, kv_heads=40, ffn=13_824, vocab=32_000, batch=4, seq=4096
        ),
        Input("attention", "Attention", "flash", "standard keeps the S×S scores", choices=("flash", "standard")),
        Input("precision", "Precision", "bf16-mixed", "2 or 4 bytes an element", choices=("bf16-mixed", "fp32")),
    ),
    asked={
        "no_checkpointing_bytes": "Activations kept without checkpointing",
        "per_layer_bytes": "Activations kept with a checkpoint at every layer",
        "ratio": "Ratio of the two",
    },
    solve=solve,
    objective="memory",
)  # fmt: skip
