"""What must hold of any prediction, and what sharding, offloading and inference do to it."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.architecture import resolve_model
from engine.catalog import gpu
from engine.closed_form import predict
from engine.closed_form.hardware import rates
from engine.closed_form.korthikanti import formula_bytes, layer_bytes
from engine.closed_form.states import optimizer_state_bytes, parameter_elements
from engine.closed_form.timing import transfer_seconds
from engine.errors import UnsupportedError
from engine.recipes import RECIPES
from engine.result import RunResult
from engine.spec import RunSpec

POLICIES = ("none", "selective", "budget-0.5", "per-layer", "sqrt", "every-3", "nested", "budget-0.1")


def predicted(**fields: Any) -> RunResult:
    return predict(RunSpec.model_validate({"model": "llama:6,128,4,2,344,512", "gpu": "a100", "seq": 256} | fields))


def bytes_of(result: RunResult, category: str) -> int:
    assert result.ledger is not None
    return sum(row.bytes for row in result.ledger if row.category == category)


@settings(max_examples=25, deadline=None)
@given(
    model=st.sampled_from(["gpt:5,64,4,96", "llama:7,64,4,1,96,128", "qwen3-4b", "phi-2", "mixtral-8x7b", "gemma-2b"]),
    checkpointing=st.sampled_from(POLICIES),
    precision=st.sampled_from(list(RECIPES)),
    attention=st.sampled_from(["flash", "standard", "tiled", "triton"]),
    optimizer=st.sampled_from(["adamw", "sgd", "adamw-8bit"]),
    micro_batch=st.integers(1, 5), seq=st.integers(1, 300), dropout=st.sampled_from([0.0, 0.1]),
    sharding=st.sampled_from(["none", "zero-1", "zero-2", "zero-3"]), world_size=st.sampled_from([1, 2, 65536]),
    grad_accumulation=st.integers(1, 3), offload_activations=st.sampled_from(["none", "cpu"]),
)  # fmt: skip
def test_the_parts_sum_to_the_whole(**fields: Any) -> None:
    try:
        result = predict(RunSpec.model_validate(fields | {"gpu": "h100"}))
    except UnsupportedError:
        assert fields["checkpointing"].startswith("budget")  # where most is outside the blocks, no plan keeps to it
        return
    memory = result.memory
    assert memory.at_peak is not None
    assert memory.device_peak_bytes is not None
    assert sum(memory.at_peak.model_dump().values()) == memory.device_peak_bytes
    assert min(memory.at_peak.model_dump().values()) >= 0
    assert bytes_of(result, "activations") == memory.saved_activation_bytes
    assert result.timing.model_flops
    assert result.timing.hardware_flops
    assert result.timing.model_flops <= result.timing.hardware_flops
    assert result.parameters == result.spec.architecture.parameters


def test_a_prediction_takes_under_a_millisecond() -> None:
    spec = RunSpec(model="llama-2-7b", seq=4096, gpu="a100", checkpointing="per-layer")
    predict(spec)
    took = []
    for _ in range(20):
        start = time.process_time()
        predict(spec)
        took.append(time.process_time() - start)
    assert min(took) < 1e-3


def test_more_recomputation_keeps_less_and_takes_longer() -> None:
    none, selective, layer = (predicted(checkpointing=c, micro_batch=8) for c in ("none", "selective", "per-layer"))
    kept = [result.memory.saved_activation_bytes or 0 for result in (none, selective, layer)]
    assert kept == sorted(kept, reverse=True)
    assert none.timing.hardware_flops < selective.timing.hardware_flops < layer.timing.hardware_flops  # type: ignore[operator]
    assert none.timing.step_seconds < selective.timing.step_seconds < layer.timing.step_seconds  # type: ignore[operator]


def test_per_layer_recomputes_one_forward_of_every_block_but_its_last_product() -> None:
    none, layer = predicted(attention="standard"), predicted(attention="standard", checkpointing="per-layer")
    rows, arch = 256, layer.spec.architecture
    products = arch.block_parameters - 2 * arch.hidden - arch.ffn * arch.hidden  # without norms and the last product
    forward = 2 * rows * products + 4 * rows**2 * arch.hidden
    extra = (layer.timing.hardware_flops or 0) - (none.timing.hardware_flops or 0)
    assert extra == arch.layers * forward


@pytest.mark.parametrize("share", [0.9, 0.5, 0.25, 0.15])
def test_a_budget_is_kept_and_used(share: float) -> None:
    whole = predicted(micro_batch=8).memory.saved_activation_bytes or 0
    kept = predicted(micro_batch=8, checkpointing=f"budget-{share}").memory.saved_activation_bytes or 0
    assert kept <= share * whole


@pytest.mark.parametrize("shape", ["gpt:2,256,4", "gpt2", "gpt:4,512,8"])
@pytest.mark.parametrize(("batch", "seq"), [(1, 128), (4, 256)])
@pytest.mark.parametrize("scheme", ["none", "selective", "full"])
def test_korthikantis_formulas_come_out_of_the_table(shape: str, batch: int, seq: int, scheme: str) -> None:
    arch = resolve_model(shape)
    assert layer_bytes(arch, batch, seq, scheme) == formula_bytes(batch, seq, arch.hidden, arch.heads, scheme)


def test_our_gpt_layer_is_korthikantis_and_the_norms_statistics() -> None:
    spec = RunSpec(model="gpt:1,256,4", attention="standard", dropout=0.1, micro_batch=2, seq=128, gpu="a100")
    rows = [row for row in predict(spec).ledger or [] if row.tensor.startswith("block.")]
    statistics = 4 * 4 * 2 * 128
    assert sum(row.bytes for row in rows) == formula_bytes(2, 128, 256, 4) + statistics


@pytest.mark.parametrize(
    ("precision", "per_parameter"), [("bf16-mixed", 12), ("bf16", 4), ("bf16-12", 8), ("fp32", 8), ("bf16-autocast", 8)]
)
def test_states_are_the_recipes(precision: str, per_parameter: int) -> None:
    arch = resolve_model("gpt2")
    states = optimizer_state_bytes(arch, RECIPES[precision], "adamw")
    assert states == pytest.approx(per_parameter * parameter_elements(arch), rel=1e-5)


def test_zero_divides_states_then_gradients_then_parameters() -> None:
    fields: dict[str, Any] = {"model": "llama-2-7b", "world_size": 64, "seq": 128, "checkpointing": "per-layer"}
    peaks = [predicted(**fields, sharding=stage).memory for stage in ("none", "zero-1", "zero-2", "zero-3")]
    parameters = [memory.at_peak.parameters for memory in peaks if memory.at_peak]
    states = [memory.at_peak.optimizer_states for memory in peaks if memory.at_peak]
    assert states[1] == states[2] == states[3] == -(-states[0] // 64)
    assert parameters[0] == parameters[1] == parameters[2] > 5 * parameters[3]
    totals = [memory.device_peak_bytes or 0 for memory in peaks]
    assert totals == sorted(totals, reverse=True)


def test_offloaded_states_leave_the_device_and_are_on_the_host() -> None:
    here, away = predicted(), predicted(offload_optimizer="cpu")
    assert away.memory.at_peak
    assert away.memory.at_peak.optimizer_states == 0
    states = 12 * (here.parameters or 0)
    assert (away.memory.host_peak_bytes or 0) >= states
    disk = predicted(offload_optimizer="nvme", offload_parameters="nvme")
    assert (disk.memory.nvme_bytes or 0) >= states
    assert (disk.memory.device_peak_bytes or 0) < (away.memory.device_peak_bytes or 0)


def test_transfers_cost_nothing_where_they_hide_and_all_where_they_do_not() -> None:
    fields: dict[str, Any] = {
        "model": "llama-2-7b",
        "checkpointing": "per-layer",
        "offload_optimizer": "cpu",
        "micro_batch": 8,
    }
    hidden = predicted(**fields, seq=4096).timing.phases_seconds.exposed_transfer
    serial = predicted(**fields, seq=4096, offload_overlap=False).timing.phases_seconds.exposed_transfer
    assert serial is not None
    assert hidden is not None
    assert serial > 1.0
    assert 0.0 < hidden < 0.1 * serial  # what is left: the update of the gradients that come last


@settings(max_examples=20, deadline=None)
@given(
    places=st.sampled_from([("cpu", "none"), ("cpu", "cpu"), ("nvme", "none"), ("nvme", "cpu"), ("nvme", "nvme")]),
    activations=st.sampled_from(["none", "cpu"]), checkpointing=st.sampled_from(["none", "per-layer"]),
    layers=st.integers(2, 12), faster=st.floats(1.0, 8.0), grad_accumulation=st.integers(1, 3),
)  # fmt: skip
def test_waiting_grows_with_bytes_and_shrinks_with_bandwidth(
    places: tuple[str, str], activations: str, layers: int, faster: float, **fields: Any
) -> None:
    offload = dict(zip(("offload_optimizer", "offload_parameters"), places, strict=True))

    def waits(depth: int, speed: float, overlap: bool) -> float:
        shape = {"model": f"llama:{depth},128,4,2,344,512", "gpu": "a100", "offload_activations": activations}
        spec = RunSpec.model_validate(shape | offload | fields | {"offload_overlap": overlap})
        card = rates(gpu("a100"), 1)
        assert card is not None
        return transfer_seconds(spec, replace(card, host_link=card.host_link * speed), 1e-4, 2e-4, layers * 2**20)

    serial, overlapped = waits(layers, 1.0, False), waits(layers, 1.0, True)
    assert 0.0 <= overlapped <= serial < math.inf
    assert serial > 0.0
    for overlap, now in ((False, serial), (True, overlapped)):
        deeper = waits(layers + 1, 1.0, overlap)
        assert waits(layers, faster, overlap) <= now <= deeper * 1.001  # files are padded: their share is not exact


def test_offloaded_activations_are_on_the_host_but_for_the_last_block() -> None:
    here = predicted(micro_batch=64, checkpointing="per-layer").memory
    away = predicted(micro_batch=64, checkpointing="per-layer", offload_activations="cpu").memory
    boundary = 64 * 256 * 128 * 2
    assert (here.saved_activation_bytes or 0) - (away.saved_activation_bytes or 0) == 5 * boundary
    assert away.host_peak_bytes == 5 * boundary


def test_inference_is_weights_cache_and_one_block() -> None:
    whole = predicted(mode="inference", model="llama-3.1-8b", seq=8192, micro_batch=2, new_tokens=128)
    chunked = predicted(
        mode="inference", model="llama-3.1-8b", seq=8192, micro_batch=2, new_tokens=128, prefill_chunk=512
    )
    assert whole.inference
    assert chunked.inference
    assert whole.inference.weights_bytes == 2 * 8_030_261_248
    assert whole.inference.kv_cache_allocated_bytes == 2 * 32 * 2 * (8192 + 128) * 8 * 128 * 2
    assert chunked.inference.activation_peak_bytes * 10 < whole.inference.activation_peak_bytes  # type: ignore[operator]
    parts = chunked.inference
    assert (chunked.memory.device_peak_bytes or 0) >= sum(
        (parts.weights_bytes or 0, parts.kv_cache_allocated_bytes or 0, parts.activation_peak_bytes or 0)
    )


def test_fits_says_against_what() -> None:
    fits = predicted(model="llama-2-7b", seq=4096, micro_batch=8).fits
    assert fits is not None
    assert not fits.fits
    assert fits.headroom_bytes < 0
    assert "A100" in fits.assumes
    assert "context" in fits.assumes
    assert predicted(gpu=None).fits is None


def test_pitfalls_are_named_with_their_numbers() -> None:
    scores = predicted(attention="standard", seq=4096).warnings
    assert any("attention scores take" in warning and "%" in warning for warning in scores)
    assert any(
        "loss_chunks" in warning for warning in predicted(model="gpt:1,64,4,50000", seq=2048, micro_batch=8).warnings
    )
    assert any("states are" in warning for warning in predicted(model="llama-2-7b", checkpointing="per-layer").warnings)


def test_unknown_is_none() -> None:
    timing = predicted(precision="fp32").timing
    assert timing.step_seconds is None
    assert timing.mfu is None
    assert timing.model_flops
    assert predicted(gpu=None).timing.step_seconds is None
