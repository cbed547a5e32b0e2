"""Sliding windows: which layers have one, what the real classes then cache and save, and what predictions say of it."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from engine.architecture import from_config
from engine.closed_form import predict
from engine.closed_form.pitfalls import masked_window_bytes
from engine.errors import SpecError
from engine.models.huggingface import model_class, transformers_config
from engine.simulate import simulate
from engine.spec import RunSpec

WIDTHS = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "num_attention_heads": 4, "vocab_size": 256,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "sliding_window": 32,
}  # fmt: skip
KINDS = [
    pytest.param({"model_type": "mistral"}, 7, id="mistral"),
    pytest.param({"model_type": "gemma2"}, 4, id="gemma2"),
    pytest.param({"model_type": "gemma3_text"}, 6, id="gemma3, five of six"),
    pytest.param({"model_type": "gpt_oss", "num_local_experts": 2, "num_experts_per_tok": 1}, 4, id="gpt-oss"),
    pytest.param({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2}, 5, id="qwen2"),
    pytest.param({"model_type": "qwen2"}, 0, id="qwen2, unused"),
    pytest.param({"model_type": "qwen3", "use_sliding_window": True}, 0, id="qwen3, none so deep"),
    pytest.param({"model_type": "gemma2", "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 5}, 2,
                 id="layer_types"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "sliding"), KINDS)
def test_as_many_layers_slide_as_in_the_class(config: dict[str, Any], sliding: int) -> None:
    arch = from_config(WIDTHS | config, "it")
    real = transformers_config(arch)
    types = getattr(real, "layer_types", None) or ["sliding_attention"] * arch.layers
    assert arch.sliding_layers == sliding
    assert sliding == (types.count("sliding_attention") if real.sliding_window else 0)


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gemma3_text", "qwen2"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("sliding_window", value) for value in (-1, 0, "a", 2.5, True, [1], 2**40)),
        *(("layer_types", value) for value in ("x", {}, [], ["full_attention"], [1] * 7, ["sometimes"] * 7, [[]] * 7)),
    ],
)  # fmt: skip
def test_a_window_that_cannot_be_is_refused(kind: str, field: str, value: object) -> None:
    with pytest.raises(SpecError, match=f"config.{field} must"):
        from_config(WIDTHS | {"model_type": kind, field: value}, "it")


@pytest.mark.parametrize(("config", "sliding"), KINDS)
def test_the_cache_is_what_the_class_keeps(config: dict[str, Any], sliding: int) -> None:
    """After 100 tokens and 4 more, one at a time."""
    spec = RunSpec(model=WIDTHS | config, mode="inference", micro_batch=2, seq=100, new_tokens=4, precision="fp32")
    real = transformers_config(spec.architecture)
    model, cache = model_class(real)(real).eval(), DynamicCache(config=real)
    with torch.no_grad():
        for tokens in (torch.zeros(2, 100, dtype=torch.long), *torch.zeros(4, 2, 1, dtype=torch.long)):
            model(input_ids=tokens, cache=cache, use_cache=True)
    kept = sum(
        layer.keys.untyped_storage().nbytes() + layer.values.untyped_storage().nbytes() for layer in cache.layers
    )
    predicted = predict(spec)
    assert predicted.inference is not None
    assert predicted.inference.kv_cache_allocated_bytes == kept
    rows = [row for row in predicted.ledger or () if row.tensor == "kv cache"]
    assert sum(row.bytes for row in rows) == kept
    assert sum(row.count for row in rows) == 7
    assert any("bounds their KV cache" in warning for warning in predicted.warnings) == (sliding > 0)


@pytest.mark.parametrize(("attention", "precision"), [("flash", "bf16"), ("standard", "fp32")])
@pytest.mark.parametrize(("config", "sliding"), KINDS[:5])
def test_a_mask_and_copied_heads_are_what_a_window_adds(
    config: dict[str, Any], sliding: int, attention: str, precision: str
) -> None:
    """The class saves so much more with a window shorter than the sequence than with a longer one."""

    def run(window: int) -> RunSpec:
        model = WIDTHS | config | {"sliding_window": window}
        return RunSpec(model=model, micro_batch=2, seq=128, attention=attention, precision=precision)

    short, long = (simulate(run(window))[0] for window in (32, 256))
    extra = (short.memory.saved_activation_bytes or 0) - (long.memory.saved_activation_bytes or 0)
    assert extra == masked_window_bytes(run(32))
    assert short.timing.model_flops == long.timing.model_flops
    assert any(f"window of 32 in {sliding} of 7 layers" in warning for warning in predict(run(32)).warnings)
    assert not any("sliding window" in warning for warning in predict(run(256)).warnings)


def test_our_own_decoder_says_that_it_has_no_window() -> None:
    training = predict(RunSpec(model="mistral-7b-v0.1", seq=8192))
    serving = predict(RunSpec(model="mistral-7b-v0.1", mode="inference", seq=8192))
    for result in (training, serving):
        assert any("window of 4096 is ignored: Remat's decoder" in warning for warning in result.warnings)
    assert serving.inference is not None
    assert serving.inference.kv_cache_bytes == 2 * 32 * 8192 * 8 * 128 * 2
