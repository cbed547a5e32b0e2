"""The exercises' answers against a simulation of the same configuration: within 2 %."""

import pytest

from engine.exercises import EXERCISES, activations, interval, selective, sequence, solve
from engine.exercises.offload import spec_of as offload_spec
from engine.result import RunResult
from engine.simulate import simulate
from engine.spec import RunSpec

WITHIN = 0.02
SMALL_LLAMA = {"layers": 3, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 344, "vocab": 500, "batch": 2, "seq": 128}


def simulated(spec: RunSpec) -> RunResult:
    return simulate(spec)[0]


@pytest.mark.parametrize("attention", ["flash", "standard"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp32"])
def test_activations(attention, precision):
    inputs = EXERCISES[1].parse({**SMALL_LLAMA, "attention": attention, "precision": precision})
    answers = solve(1, inputs).answers
    for key, policy in (("no_checkpointing_bytes", "none"), ("per_layer_bytes", "per-layer")):
        memory = simulated(activations.spec_of(inputs, checkpointing=policy)).memory
        assert answers[key] == pytest.approx(memory.saved_activation_bytes, rel=WITHIN)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "policy"), [("per_layer_bytes", "per-layer"), ("no_checkpointing_bytes", "none")], ids=["per-layer", "none"]
)
def test_activations_of_llama_13b_itself(key, policy):
    inputs = EXERCISES[1].parse({})
    memory = simulated(activations.spec_of(inputs, checkpointing=policy)).memory
    assert solve(1, inputs).answers[key] == pytest.approx(memory.saved_activation_bytes, rel=WITHIN)


def test_the_best_interval():
    inputs = EXERCISES[2].parse({"layers": 8, "hidden": 64, "heads": 2, "batch": 2, "seq": 128})
    answers = solve(2, inputs).answers
    peaks = {k: interval.activation_peak(simulated(interval.spec_of(inputs, f"every-{k}"))) for k in (1, 2, 3, 4)}
    assert answers["discrete_k"] == min(peaks, key=peaks.__getitem__)
    points = dict(interval.simulated_points(inputs, simulated).points)
    assert points == {k: peaks[k] for k in points}
    assert answers["minimum_bytes"] == pytest.approx(min(peaks.values()), rel=WITHIN)


def test_what_crosses_the_link():
    """2 bytes for each parameter that the simulated model has."""
    inputs = EXERCISES[3].parse({"model": "llama-2-7b"})
    spec = offload_spec(inputs, seq=128, offload_optimizer="none")
    assert solve(3, inputs).answers["down_bytes"] == 2 * (simulated(spec).parameters or 0)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
def test_peaks_with_and_without_the_square(precision):
    inputs = EXERCISES[4].parse({"model": "llama-tiny", "seq": 512, "batch": 2, "precision": precision})
    answers = solve(4, inputs).answers
    for key, side in (("standard_none_bytes", "a"), ("flash_checkpointed_bytes", "b")):
        peak = simulated(sequence.spec_of(inputs, side)).memory.device_peak_bytes
        assert answers[key] == pytest.approx(peak, rel=WITHIN)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "side"), [("standard_none_bytes", "a"), ("flash_checkpointed_bytes", "b")], ids=["standard", "flash"]
)
def test_peaks_of_7b_itself(key, side):
    inputs = EXERCISES[4].parse({})
    peak = simulated(sequence.spec_of(inputs, side)).memory.device_peak_bytes
    assert solve(4, inputs).answers[key] == pytest.approx(peak, rel=WITHIN)


@pytest.mark.parametrize("recompute", ["norms+attention-core+mlp-activation", "qkv+mlp-in", "dropout"])
def test_a_selective_strategy(recompute):
    shape = {"layers": 2, "hidden": 64, "heads": 2, "vocab": 300, "batch": 2, "seq": 128}
    inputs = EXERCISES[5].parse({**shape, "recompute": recompute})
    none, mine = (simulated(selective.spec_of(inputs, groups)) for groups in ((), recompute.split("+")))
    saved = (none.memory.saved_activation_bytes or 0) - (mine.memory.saved_activation_bytes or 0)
    assert solve(5, inputs).answers["saved_bytes"] == pytest.approx(saved, rel=WITHIN)
