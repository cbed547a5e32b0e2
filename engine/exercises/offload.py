"""Exercise 3: a 70B model trained with its optimizer on the CPU: what crosses PCIe in a step, and how long it takes."""

from __future__ import annotations

import math

from engine.catalog import gpu
from engine.closed_form import predict
from engine.closed_form.states import parameter_elements
from engine.exercises.exercise import (
    Bar,
    Bars,
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
from engine.recipes import DTYPE_BYTES, RECIPES
from engine.spec import RunSpec
from engine.units import GB, format_bytes, format_seconds

MODELS = ("llama-2-70b", "llama-3.1-70b", "llama-2-13b", "llama-2-7b", "llama-7b", "llama-3.1-8b", "mistral-7b-v0.1")
CARDS = ("h100-sxm", "h200-sxm", "a100-80gb-sxm", "rtx-4090")


def spec_of(inputs: Inputs, **changes: object) -> RunSpec:
    fields: dict[str, object] = {
        "model": inputs["model"],
        "precision": inputs["traffic"],
        "offload_optimizer": "cpu",
        "checkpointing": "per-layer",
        "gpu": inputs["gpu"],
        "seq": 4096,
    }
    return build_spec(**(fields | changes))


def compute_seconds_per_token(inputs: Inputs) -> float:
    """Predicted forward and backward of one sequence on the chosen card, per token; matrix products are bf16."""
    spec = spec_of(inputs, offload_optimizer="none", precision="bf16-mixed")
    phases = predict(spec).timing.phases_seconds
    assert phases.forward is not None
    assert phases.backward is not None
    return (phases.forward + phases.backward) / spec.tokens_per_step


def solve(inputs: Inputs) -> Solution:
    spec = spec_of(inputs)
    parameters = parameter_elements(spec.architecture)
    size = DTYPE_BYTES[RECIPES[inputs["traffic"]].weight]
    down = up = size * parameters
    bandwidth, real = inputs["link_gbs"] * GB, inputs["measured_gbs"] * GB
    serial, duplex = (down + up) / bandwidth, max(down, up) / bandwidth
    per_token = compute_seconds_per_token(inputs)
    hiding = {"serial": math.ceil(serial / per_token), "duplex": math.ceil(duplex / per_token)}
    real_duplex = max(down, up) / real
    other_size = 6 - size
    card = gpu(inputs["gpu"])
    predicted = predict(spec)
    host, exposed = predicted.memory.host_peak_bytes or 0, predicted.timing.phases_seconds.exposed_transfer or 0.0
    steps = [
        Step("Parameters, counted exactly.", "N", parameters, "parameters"),
        Step(
            f"Down: every step each gradient goes to the host, {size} bytes each.",
            f"D = {size}·N = {size}·{number(parameters)}",
            down,
            "B",
        ),
        Step("Up: the updated weights come back, as many bytes.", f"U = {size}·N", up, "B"),
        Step(
            "One after the other on a link of this bandwidth in each direction:",
            f"t_serial = (D + U)/w = (D + U)/({number(inputs['link_gbs'])}·10^9)",
            serial,
            "s",
        ),
        Step("PCIe carries both directions at once, so overlapped they take the longer of the two:",
             "t_duplex = D/w", duplex, "s"),
        Step(
            f"Links do not reach their data sheet: at {number(inputs['measured_gbs'])} GB/s the overlapped one takes",
            f"D/({number(inputs['measured_gbs'])}·10^9)",
            real_duplex,
            "s",
        ),
        Step(
            f"Forward and backward take this long for a token on one {card.name} (predicted, per-layer checkpoints):",
            "t_token",
            per_token,
            "s",
        ),
        Step("So the overlapped transfer, the CPU's update left out, hides behind this many tokens a step and more:",
             "t_duplex/t_token", hiding["duplex"], "tokens"),
        Step("Serially, half of a step is transfer at", "t_serial/t_token", hiding["serial"], "tokens"),
        Step("What stays in host memory: master copy, moments and the buffers of the transfer.", "H", host, "B"),
    ]  # fmt: skip
    notes = [
        "The notes' example, a 7B model over PCIe 4.0 at 32 GB/s, counts 14 GB and 0.44 s: one direction. Both "
        "directions carry 2N bytes; full duplex they share those 0.44 s, one after the other they need 0.88 s.",
        f"With {other_size} bytes a value instead ({'fp32' if other_size == 4 else 'bf16'} traffic) every time here "
        f"{'doubles' if other_size == 4 else 'halves'}: {format_seconds(duplex * other_size / size)} overlapped.",
        "All this is the transfer alone. With the CPU's update of every parameter counted as well, and the link as "
        f"this GPU reaches it, a step of {spec.tokens_per_step:,} tokens is predicted to wait "
        f"{format_seconds(exposed)} beyond forward and backward.",
        f"A rounded 70 billion parameters would give {format_bytes(size * 70e9)} each way; the exact count of "
        f"{inputs['model']} is {number(parameters)}.",
    ]
    if inputs["model"] not in ("llama-2-70b", "llama-3.1-70b"):
        notes.pop()
    largest = 4 * hiding["serial"]
    tokens = [max(1, round(largest * step / 40)) for step in range(1, 41)]
    lines = Lines(
        "Does compute hide the transfer?", "Tokens in a step", "Seconds a step", "s",
        (
            Series("Forward and backward", tuple((t, t * per_token) for t in tokens), "line"),
            Series("Transfer, serial", ((tokens[0], serial), (tokens[-1], serial)), "dashed"),
            Series("Transfer, full duplex", ((tokens[0], duplex), (tokens[-1], duplex)), "dashed"),
            Series("Full duplex, measured bandwidth", ((tokens[0], real_duplex), (tokens[-1], real_duplex)), "dashed"),
            Series("Hidden from here", ((hiding["duplex"], duplex),), "mark", (f"{hiding['duplex']:,} tokens",)),
        ),
        x_unit="tokens",
    )  # fmt: skip
    bars = Bars(
        "One step's transfers",
        "s",
        (
            Bar("serial", (("Gradients down", down / bandwidth), ("Weights up", up / bandwidth))),
            Bar("full duplex", (("Both at once", duplex),)),
            Bar("full duplex, measured bandwidth", (("Both at once", real_duplex),)),
        ),
    )
    return Solution(
        inputs=inputs,
        answers={"down_bytes": down, "up_bytes": up, "serial_seconds": serial, "duplex_seconds": duplex},
        steps=steps,
        notes=notes,
        charts=[bars, lines],
        spec=compact(spec),
        small_spec={"model": "gpt:8,512,8", "precision": "fp32", "device": "cpu", "seq": 256},
        vary={"offload_optimizer": ["none", "cpu"], "offload_overlap": [True, False]},
        guesses={
            "down_bytes": [
                Guess(other_size * parameters, f"That is {other_size} bytes a value: this traffic has {size}."),
                Guess(down + up, "Both directions are counted: this asks for the gradients going down."),
                Guess(12 * parameters, "Master copy and moments do not travel: they live on the host."),
            ],
            "up_bytes": [
                Guess(other_size * parameters, f"That is {other_size} bytes a value: this traffic has {size}."),
                Guess(down + up, "Both directions are counted: this asks for the weights coming up."),
            ],
            "serial_seconds": [
                Guess(duplex, "One direction only: gradients go down and weights come up."),
                Guess((down + up) / real, "Right at the measured bandwidth.", right=True),
                Guess(serial * other_size / size, f"That is {other_size} bytes a value: this traffic has {size}."),
            ],
            "duplex_seconds": [
                Guess(serial, "That is one direction after the other: full duplex carries both at once."),
                Guess(real_duplex, "Right at the measured bandwidth.", right=True),
                Guess(duplex / 2, "Half of one direction: full duplex still has to carry all of it each way."),
            ],
        },
    )


EXERCISE = Exercise(
    number=3,
    name="Offload",
    title="70B with its optimizer on the CPU",
    question="A 70B model trains with ZeRO-Offload: the optimizer and its states live in host memory, gradients go "
    "down PCIe 5.0 (64 GB/s each way), updated weights come back. How many bytes cross in each direction in a step, "
    "how long does that take one after the other and in full duplex, and how many tokens a step hide the transfer?",
    inputs=(
        Input("model", "Model", "llama-2-70b", "", choices=MODELS),
        Input("traffic", "Precision", "bf16-mixed", "2 or 4 bytes a value on the link", choices=("bf16-mixed", "fp32")),
        Input("link_gbs", "Link, GB/s", 64.0, "each direction, by the data sheet", "w", 0.1, 10_000),
        Input("measured_gbs", "Measured, GB/s", 55.0, "what the link reaches", "", 0.1, 10_000),
        Input("gpu", "GPU", "h100-sxm", "for the time of a token", choices=CARDS),
    ),
    asked={
        "down_bytes": "Bytes down in a step (gradients)",
        "up_bytes": "Bytes up in a step (weights)",
        "serial_seconds": "Transfer time, one direction after the other",
        "duplex_seconds": "Transfer time, full duplex",
    },
    solve=solve,
    objective="offload",
)  # fmt: skip
