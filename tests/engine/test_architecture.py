"""Exact parameter counts for the catalog and for one small config a model type; bad configs are refused by name."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.architecture import from_config, parameter_table, resolve_model
from engine.architecture.encoders import OTHERS
from engine.architecture.huggingface import DECODERS
from engine.catalog import model_configs
from engine.closed_form import predict
from engine.errors import SpecError, UnsupportedError
from engine.spec import RunSpec

LLAMA = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 64, "pad_token_id": None,
}  # fmt: skip
GPT = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100, "n_positions": 64}
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip

SMALL: dict[str, dict[str, Any]] = {
    "llama": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "mistral": LLAMA | {"head_dim": 24},
    "granite": LLAMA,
    "phi3": LLAMA,
    "qwen2": LLAMA,
    "qwen2_moe": LLAMA | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 48, "mlp_only_layers": [],
    },
    "qwen3": LLAMA | {"head_dim": 24},
    "qwen3_moe": LLAMA | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
        "mlp_only_layers": [1], "head_dim": 16,
    },
    "mixtral": LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma": LLAMA | {"head_dim": 24, "pad_token_id": 0},
    "gemma2": LLAMA | {"head_dim": 24, "pad_token_id": 0},
    "gemma3_text": LLAMA | {"head_dim": 24, "pad_token_id": 0},
    "phi": LLAMA,
    "gpt2": GPT,
    "gpt_neox": LLAMA,
    "gptj": GPT | {"rotary_dim": 8},
    "opt": LLAMA | {"ffn_dim": 96, "word_embed_proj_dim": 32, "pad_token_id": 1},
    "bloom": {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100},
    "falcon": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100},
    "mpt": {"d_model": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 100, "max_seq_len": 64},
    "olmo": LLAMA,
    "olmo2": LLAMA,
    "starcoder2": LLAMA,
    "gpt_oss": LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "llama4_text": LLAMA | {
        "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 80,
        "head_dim": 16,
    },
    "deepseek_v2": LLAMA | LATENT,
    "deepseek_v3": LLAMA | LATENT,
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "state_size": 8},
}  # fmt: skip


def real_count(config: dict[str, Any]) -> int:
    """Parameters of the real transformers class, on the meta device."""
    import torch
    import transformers

    options = {key: value for key, value in config.items() if not key.startswith("_")}
    kind = options.pop("model_type")
    for name in ("architectures", "quantization_config"):
        options.pop(name, None)
    if kind == "llama4":
        return real_count(options["text_config"])
    classes = {"bert": transformers.AutoModel, "t5": transformers.AutoModelForSeq2SeqLM}
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = classes.get(kind, transformers.AutoModelForCausalLM).from_config(
            transformers.AutoConfig.for_model(kind, **options)
        )
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(model_configs()))
def test_a_catalog_model_has_as_many_parameters_as_its_class(name: str) -> None:
    assert resolve_model(name).parameters == real_count(model_configs()[name])


def test_stated_counts_are_met_but_for_llm_foundrys_mpt_build() -> None:
    stated = {name: c["_true_param_count"] for name, c in model_configs().items() if "_true_param_count" in c}
    off = {name for name, count in stated.items() if resolve_model(name).parameters != count}
    assert off == {name for name in stated if name.startswith("mpt")}
    for name in off:
        arch = resolve_model(name)
        biases = arch.layers * (3 * arch.hidden + arch.hidden + arch.ffn + arch.hidden)
        norm_biases = (2 * arch.layers + 1) * arch.hidden
        positions = 2048 * arch.hidden
        assert stated[name] - arch.parameters == biases + norm_biases + positions


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(SMALL))
def test_a_small_config_of_each_type_has_as_many_parameters_as_its_class(kind: str) -> None:
    config = {"model_type": kind} | SMALL[kind]
    assert from_config(config, kind).parameters == real_count(config)


def test_every_decoder_type_is_tested() -> None:
    assert set(DECODERS) - set(SMALL) == {"ministral"}  # LLaMA's row under a newer name


@pytest.mark.parametrize("kind", sorted(set(SMALL) - set(OTHERS)))
def test_every_decoder_type_has_a_closed_form(kind: str) -> None:
    spec = RunSpec(model={"model_type": kind} | SMALL[kind], seq=32, gpu="a100")
    result = predict(spec)
    assert result.parameters == spec.architecture.parameters
    assert result.memory.device_peak_bytes
    assert result.timing.step_seconds


@pytest.mark.parametrize("name", ["bert-base-uncased", "t5-base"])
def test_encoders_have_an_architecture_and_no_closed_form(name: str) -> None:
    assert resolve_model(name).style == "other"
    with pytest.raises(UnsupportedError, match="no closed form"):
        predict(RunSpec(model=name))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 65}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 2**14 + 1}, "from 1 to 16384"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 3}, "kv_heads"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"hidden_act": "sine"}, "hidden_act"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"model_type": "warp-drive"}, "model_type"),
    ],
)
def test_an_impossible_config_is_refused_naming_the_field(change: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        from_config({"model_type": "llama"} | LLAMA | change, "config.json")


def test_an_unknown_field_is_noted() -> None:
    arch = from_config({"model_type": "llama", "warp_factor": 9} | LLAMA, "config.json")
    assert arch.notes == ("config field warp_factor ignored",)


def test_a_nested_text_config_is_read() -> None:
    arch = from_config({"model_type": "gemma3", "text_config": SMALL["gemma3_text"]}, "config.json")
    assert arch.layers == 3
    assert "text_config" in arch.notes[0]


def test_active_parameters_of_mixtral_are_the_published_ones() -> None:
    assert resolve_model("mixtral-8x7b").active_parameters == 12_879_925_248


def test_the_table_of_our_own_styles_is_the_decoders() -> None:
    import torch

    from engine.attention import Kernel
    from engine.models.decoder import Decoder

    for name in ("gpt:2,64,4,100", "llama:2,64,4,2,96,100", "qwen2.5-7b"):
        arch = resolve_model(name).for_sequence(16)
        with torch.device("meta"):
            model = Decoder(arch, Kernel("none", lambda q, k, v, causal, dropout: q), positions=16)
        shapes = sorted(tuple(parameter.shape) for parameter in model.parameters())
        assert shapes == sorted(p.shape for p in parameter_table(arch) for _ in range(p.count))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([*DECODERS, *OTHERS, "llama4", "gemma3"]),
    junk=st.dictionaries(
        st.sampled_from(["text_config", "moe_layers", "mlp_only_layers", "sliding_window", "rope_theta",
                         *(key for config in SMALL.values() for key in config)]),
        JUNK, max_size=4,
    ),
    keep=st.booleans(),
)  # fmt: skip
def test_any_object_is_an_architecture_or_a_spec_error(kind: str, junk: dict[str, Any], keep: bool) -> None:
    base = SMALL.get(kind, {}) if keep else {}
    try:
        arch = from_config({"model_type": kind} | base | junk, "config.json")
    except SpecError:  # the only error that may come out
        return
    assert arch.parameters > 0
    assert json.dumps(list(arch.notes))
    if arch.family == "decoder":
        assert arch.block_parameters > 0
