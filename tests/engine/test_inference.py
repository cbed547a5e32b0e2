from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.closed_form import predict
from engine.inference import build_inference
from engine.measure import measure
from engine.models.kv_cache import KvCache
from engine.simulate import simulate
from engine.spec import RunSpec

CPU = torch.device("cpu")


def spec(**fields: object) -> RunSpec:
    base = {"model": "llama:2,64,4,2,176,512", "mode": "inference", "seq": 96, "new_tokens": 6, "device": "cpu"}
    return RunSpec.model_validate({**base, "precision": "fp32", "steps": 1, "warmup": 0, **fields})


def without_a_cache(run_spec: RunSpec) -> Tensor:
    """Greedy generation that runs the whole sequence again for every token."""
    run = build_inference(run_spec, CPU)
    tokens = run._prompt(0)
    with torch.no_grad():
        for _ in range(run_spec.new_tokens):
            logits = run.model(tokens)[:, -1:] @ run.model.head_weight.mT
            tokens = torch.cat((tokens, logits.argmax(-1)), 1)
    return tokens[:, run_spec.seq :]


@pytest.mark.parametrize("model", ["llama:2,64,4,2,176,512", "gpt:2,64,4,512"])
@pytest.mark.parametrize("attention", ["flash", "standard", "tiled"])
@pytest.mark.parametrize("chunk", [0, 32, 7])
def test_cached_chunked_generation_equals_running_everything_again(model: str, attention: str, chunk: int) -> None:
    fields = {"model": model, "attention": attention, "micro_batch": 2}
    expected = without_a_cache(spec(**fields))
    assert build_inference(spec(**fields, prefill_chunk=chunk), CPU).step(0).tolist() == expected.tolist()


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-autocast"])
def test_chunks_generate_the_same_tokens_in_bfloat16(precision: str) -> None:
    whole, chunked = (
        build_inference(spec(precision=precision, prefill_chunk=chunk, new_tokens=12), CPU).step(0) for chunk in (0, 24)
    )
    assert whole.tolist() == chunked.tolist()


def test_last_hidden_states_of_chunks_agree_with_the_whole() -> None:
    run = build_inference(spec(), CPU)
    tokens = run._prompt(0)
    with torch.no_grad():
        whole = run.model(tokens)
        parts = [run.model(part, start=32 * i, caches=run.caches) for i, part in enumerate(tokens.split(32, 1))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16-mixed", 2), ("bf16-autocast", 2)])
def test_the_cache_is_two_tensors_a_layer_of_key_heads(precision: str, size: int) -> None:
    inference = measure(spec(precision=precision, micro_batch=3))[0].inference
    assert inference is not None
    layers, kv_heads, head_dim, seq, new = 2, 2, 16, 96, 6
    assert inference.kv_cache_bytes == 2 * layers * 3 * seq * kv_heads * head_dim * size
    assert inference.kv_cache_allocated_bytes == 2 * layers * 3 * (seq + new) * kv_heads * head_dim * size


def test_three_methods_agree_on_the_memory_of_a_request() -> None:
    wanted = spec(model="llama-tiny", seq=256, prefill_chunk=64)
    results = [measure(wanted)[0], simulate(wanted)[0], predict(wanted)]
    measured = results[0]
    assert measured.memory.at_peak is not None
    assert sum(measured.memory.at_peak.model_dump().values()) == measured.memory.device_peak_bytes
    for result in results[1:]:
        assert result.memory.device_peak_bytes == pytest.approx(measured.memory.device_peak_bytes, rel=0.03)
        assert result.inference is not None
        assert measured.inference is not None
        assert result.inference.kv_cache_bytes == measured.inference.kv_cache_bytes
        assert result.inference.weights_bytes == measured.inference.weights_bytes


@pytest.mark.slow
def test_peak_activations_fall_with_the_chunk_and_tokens_stay() -> None:
    results = [
        measure(spec(model="llama-tiny", seq=2048, new_tokens=16, prefill_chunk=chunk))[0].inference
        for chunk in (0, 512, 128)
    ]
    whole, half_k, small = (result for result in results if result is not None)
    assert whole.generated_tokens == half_k.generated_tokens == small.generated_tokens
    assert len(whole.generated_tokens or []) == 16
    peaks = [result.activation_peak_bytes or 0 for result in (whole, half_k, small)]
    assert peaks[0] > 2 * peaks[1] > 4 * peaks[2] > 0
    for result in (whole, half_k, small):
        assert result.kv_cache_bytes == 2 * 4 * 2048 * 4 * 32 * 4
        assert (result.time_to_first_token_seconds or 0) > 0
        assert (result.decode_tokens_per_second or 0) > 0


def test_new_tokens_zero_is_a_prefill_alone() -> None:
    result, timeline = measure(spec(new_tokens=0))
    assert result.inference is not None
    assert result.inference.generated_tokens == []
    assert result.inference.decode_tokens_per_second is None
    assert result.inference.time_to_first_token_seconds is not None
    assert timeline is not None


def test_offloaded_parameters_generate_the_same_tokens() -> None:
    resident, offloaded = (measure(spec(offload_parameters=tier))[0] for tier in ("none", "cpu"))
    assert resident.inference is not None
    assert offloaded.inference is not None
    assert resident.inference.generated_tokens == offloaded.inference.generated_tokens
    assert (offloaded.memory.host_peak_bytes or 0) > 0


def test_a_full_cache_says_so() -> None:
    cache = KvCache(1, 2, 4, 8, dtype=torch.float32, device=CPU)
    keys = torch.ones(1, 2, 3, 8)
    stored = cache.append(keys, keys)
    assert stored[0].shape == (1, 2, 3, 8)
    with pytest.raises(ValueError, match="holds 4 positions, not 6"):
        cache.append(keys, keys)
