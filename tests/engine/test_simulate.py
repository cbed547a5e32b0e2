"""Simulation: a deep model written out from two shallow ones is the one simulated in full, storage by storage."""

import time

import pytest

from engine import simulate as simulation
from engine.checkpoint_names import parse_checkpointing
from engine.closed_form import predict
from engine.depth import at_depth, fixed_plan, shallow_depth
from engine.extrapolate import Depths, NotUniform, deepen
from engine.measure import measure
from engine.simulate import simulate
from engine.spec import RunSpec

GEMMA = {
    "model_type": "gemma2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 18,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512, "sliding_window": 32,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 9,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512,
}  # fmt: skip

DEEP = [
    pytest.param({"model": "gpt:9,64,2,512"}, id="gpt"),
    pytest.param({"model": "llama:9,64,4,2,128,512", "precision": "bf16-autocast"}, id="llama, autocast"),
    pytest.param({"model": "llama:9,64,4,2,128,512", "checkpointing": "per-layer"}, id="llama, per-layer"),
    pytest.param(
        {"model": "gpt:9,64,2,512", "checkpointing": "per-layer", "precision": "bf16-autocast"},
        id="gpt, per-layer, autocast",
    ),
    pytest.param({"model": "gpt:18,64,2,512", "checkpointing": "every-2"}, id="gpt, every-2"),
    pytest.param({"model": "gpt:29,32,2,64", "checkpointing": "every-3"}, id="gpt, every-3, a short last segment"),
    pytest.param({"model": "gpt:9,64,2,512", "checkpointing": "selective"}, id="gpt, selective"),
    pytest.param({"model": "gpt:9,64,2,512", "grad_accumulation": 2, "precision": "fp32"}, id="gpt, accumulation"),
    pytest.param({"model": "gpt:9,64,2,512", "optimizer": "adamw-8bit", "dropout": 0.1}, id="gpt, 8-bit, dropout"),
    pytest.param({"model": LLAMA, "checkpointing": "per-layer"}, id="transformers llama"),
    pytest.param({"model": GEMMA}, id="transformers gemma2, alternating windows"),
]


@pytest.mark.parametrize("fields", DEEP)
def test_a_deep_step_written_out_is_the_one_simulated_in_full(fields: dict) -> None:
    spec = RunSpec.model_validate({"micro_batch": 2, "seq": 64, **fields})
    plan = parse_checkpointing(spec.checkpointing)
    depths = shallow_depth(spec.architecture, plan)
    assert depths is not None
    written = simulation._deep(spec, spec.architecture, fixed_plan(spec.architecture, plan), depths)
    full = simulation._record(spec, spec.architecture, plan)
    assert written.steady.trace() == full.steady.trace()
    assert written.first.trace() == full.first.trace()
    assert written.parameters == full.parameters
    for recomputed in (False, True):
        assert written.steady.flops(recomputed=recomputed) == full.steady.flops(recomputed=recomputed)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"model": "gpt:12,32,2,64", "checkpointing": "nested"}, id="nested"),
        pytest.param({"model": "gpt:12,32,2,64", "checkpointing": "budget-0.4", "dropout": 0.1}, id="budget, dropout"),
        pytest.param({"model": "llama:12,32,2,1,64,64", "checkpointing": "sqrt", "grad_accumulation": 2}, id="sqrt"),
        pytest.param({"model": "gpt:8,32,2,64", "sharding": "zero-3", "world_size": 4}, id="zero-3"),
        pytest.param({"model": GEMMA, "checkpointing": "every-4"}, id="transformers gemma2"),
    ],
)
def test_one_step_is_enough_where_steps_repeat_themselves(fields: dict) -> None:
    spec = RunSpec.model_validate({"micro_batch": 2, "seq": 64, **fields})
    arch, plan = spec.architecture, parse_checkpointing(spec.checkpointing)
    assert simulation._steps_repeat(spec, arch)
    one, two = (simulation._record(spec, arch, plan, steps) for steps in (1, 2))
    assert one.first == two.first
    assert one.steady == two.steady


@pytest.mark.parametrize(
    "fields",
    [
        {"checkpointing": "per-layer", "max_grad_norm": 1.0},
        {"sharding": "zero-2", "world_size": 4},
        {"sharding": "zero-3", "world_size": 4, "checkpointing": "sqrt"},
        {"offload_optimizer": "cpu", "offload_activations": "cpu"},
        {"offload_optimizer": "nvme", "offload_parameters": "nvme", "checkpointing": "nested"},
        {"model": GEMMA, "checkpointing": "selective"},
    ],
    ids=["clipped", "zero-2", "zero-3", "host", "nvme", "transformers gemma2"],
)
def test_three_micro_batches_are_enough(fields: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RunSpec.model_validate(
        {"model": "gpt:5,32,2,64", "micro_batch": 2, "seq": 32, "precision": "bf16-mixed", "grad_accumulation": 7}
        | fields
    )
    few = simulate(spec)[0]
    monkeypatch.setattr(simulation, "MOST_MICRO_BATCHES", 7)
    every = simulate(spec)[0]
    assert (few.memory, few.timing, few.parameters) == (every.memory, every.timing, every.parameters)
    assert "3 of 7 micro-batches" in " ".join(few.warnings)


def test_a_tier_that_fills_in_the_first_step_needs_two() -> None:
    spec = RunSpec(model="gpt:9,32,2,64", seq=16, offload_optimizer="cpu")
    assert not simulation._steps_repeat(spec, spec.architecture)


def test_a_stack_that_does_not_repeat_itself_is_refused() -> None:
    spec = RunSpec(model="gpt:9,64,2,512", seq=64)
    shallow = simulation._record(spec, at_depth(spec.architecture, 3), parse_checkpointing("none")).steady
    other = simulation._record(spec, at_depth(spec.architecture, 4), parse_checkpointing("every-3")).steady
    with pytest.raises(NotUniform):
        deepen(shallow, other, Depths(3, 1), 9)


@pytest.mark.parametrize("policy", ["nested", "budget-0.5"])
def test_schedules_that_depend_on_the_whole_depth_are_simulated_in_full(policy: str) -> None:
    assert shallow_depth(RunSpec(model="gpt:99,64,2").architecture, parse_checkpointing(policy)) is None


@pytest.mark.parametrize("model", ["gpt:2,64,2,512", "llama:2,64,4,2,128,512"])
@pytest.mark.parametrize("policy", ["none", "per-layer", "selective"])
def test_simulated_and_measured_peaks_agree(model: str, policy: str) -> None:
    spec = RunSpec(model=model, micro_batch=2, seq=128, checkpointing=policy, device="cpu", steps=1, warmup=1)
    measured, simulated = measure(spec)[0].memory, simulate(spec)[0].memory
    assert simulated.device_peak_bytes == pytest.approx(measured.device_peak_bytes, rel=0.02)
    assert simulated.saved_activation_bytes == pytest.approx(measured.saved_activation_bytes, rel=0.001)
    assert simulated.peak_phase == measured.peak_phase


def test_the_result_is_whole() -> None:
    spec = RunSpec(model="gpt:4,64,2,512", seq=64, checkpointing="per-layer", gpu="h100")
    result, curve = simulate(spec)
    memory = result.memory
    assert memory.at_peak is not None
    assert sum(memory.at_peak.model_dump().values()) == memory.device_peak_bytes
    assert memory.device_reserved_bytes is not None
    assert memory.device_reserved_bytes >= (memory.device_peak_bytes or 0)
    assert result.parameters == spec.architecture.parameters
    assert result.fits is not None
    assert result.fits.fits
    assert curve.x[curve.peak_index] >= 0


@pytest.mark.parametrize("policy", ["none", "per-layer", "selective", "nested"])
@pytest.mark.parametrize("attention", ["standard", "flash", "tiled"])
def test_flops_are_the_closed_form_s(attention: str, policy: str) -> None:
    """With recomputation and without; the scores that a flash backward makes again are recomputation."""
    spec = RunSpec(model="gpt:3,64,2,512", seq=64, attention=attention, checkpointing=policy, loss_chunks=2)
    simulated, closed = simulate(spec)[0].timing, predict(spec).timing
    assert simulated.model_flops == closed.model_flops
    assert simulated.hardware_flops == closed.hardware_flops
    recomputes = policy != "none" or attention != "standard"
    assert ((simulated.hardware_flops or 0) > (simulated.model_flops or 0)) == recomputes


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "sqrt", "nested"])
def test_a_70b_model_takes_seconds(policy: str) -> None:
    start = time.process_time()
    result, _ = simulate(RunSpec(model="llama-3.1-70b", seq=2048, checkpointing=policy))
    assert time.process_time() - start < 20  # of the processor; a third of it on a quiet machine
    assert result.parameters == 70_553_706_496
    assert (result.memory.at_peak.parameters if result.memory.at_peak else 0) > 2 * 70_553_706_496
