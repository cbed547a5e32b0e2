"""A Hugging Face config.json as an Architecture: one table row a model type.

What a field's absence means is what the transformers class of that type does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from engine.architecture.encoders import OTHERS
from engine.architecture.parameters import Latent
from engine.architecture.reader import Reader
from engine.architecture.shapes import LARGEST_SHAPE, MAX_LAYERS, Architecture, runs_in_our_decoder
from engine.architecture.windows import sliding_window
from engine.errors import SpecError

Fields = dict[str, Any]
Row = Callable[[Reader], Fields]

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_python": "gelu", "relu2": "relu",
}  # fmt: skip


def shapes(
    r: Reader, *, head_dim: int = 0, tied: bool = False, activation: str = "silu", grouped: bool = True
) -> Fields:
    """The fields that most types share, under the names of LLaMA, GPT-2 and BLOOM. Some types know no grouped heads."""
    hidden = r.size("hidden_size", "n_embd", "d_model", "n_embed")
    heads = r.size("num_attention_heads", "n_head", "n_heads")
    width = r.size("head_dim", default=head_dim or hidden // heads or 1)
    if not head_dim and "head_dim" not in r.config and hidden % heads:
        raise SpecError("model", f"config.hidden_size ({hidden}) must be a multiple of the heads ({heads})")
    act = r.text("hidden_act", "hidden_activation", "activation_function", "activation", default=activation)
    if act not in ACTIVATIONS:
        raise SpecError("model", f"config.hidden_act {act[:40]!r} is not known; one of {', '.join(ACTIVATIONS)}")
    return {
        "layers": r.size("num_hidden_layers", "n_layer", "n_layers", "num_layers", most=MAX_LAYERS),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": r.size("num_key_value_heads", default=heads) if grouped else heads,
        "head_dim": width,
        "vocab": r.size("vocab_size"),
        "max_positions": r.size("max_position_embeddings", "n_positions", "max_seq_len", default=2048),
        "activation": ACTIVATIONS[act],
        "tied": r.flag("tie_word_embeddings", tied),
    }


def llama(r: Reader, **options: Any) -> Fields:
    """LLaMA and what differs from it by an option only."""
    biased = r.flag("attention_bias", False)
    return {
        **shapes(r, **options), "ffn": r.size("intermediate_size"), "qkv_bias": biased, "output_bias": biased,
        "mlp_bias": r.flag("mlp_bias", False),
    }  # fmt: skip


def experts(r: Reader, fields: Fields, *, count: str, width: str) -> Fields:
    """Routed experts in place of a dense MLP."""
    return fields | {
        "experts": r.size(count, "num_experts", "num_local_experts", "n_routed_experts"),
        "experts_per_token": r.size("num_experts_per_tok", "experts_per_token", "num_experts_per_token"),
        "expert_ffn": r.size(width, "intermediate_size"),
    }


def sparse_steps(r: Reader, layers: int) -> int:
    """Dense layers of Qwen's mixtures: all but every `decoder_sparse_step`th, and `mlp_only_layers`."""
    step, only = r.size("decoder_sparse_step", default=1), set(r.indices("mlp_only_layers"))
    return sum(1 for layer in range(layers) if layer in only or (layer + 1) % step)


def qwen2(r: Reader) -> Fields:
    return llama(r) | {"qkv_bias": True, "output_bias": False}


def qwen2_moe(r: Reader) -> Fields:
    fields = experts(r, qwen2(r), count="num_experts", width="moe_intermediate_size")
    shared = r.size("shared_expert_intermediate_size", default=0, least=0)
    return fields | {
        "shared_ffn": shared, "shared_gate": shared > 0, "dense_layers": sparse_steps(r, fields["layers"])
    }  # fmt: skip


def qwen3(r: Reader) -> Fields:
    return llama(r, head_dim=128) | {"qk_norm": "head"}


def qwen3_moe(r: Reader) -> Fields:
    fields = experts(r, llama(r) | {"qk_norm": "head"}, count="num_experts", width="moe_intermediate_size")
    return fields | {"dense_layers": sparse_steps(r, fields["layers"])}


def mixtral(r: Reader) -> Fields:
    return experts(r, llama(r), count="num_local_experts", width="intermediate_size")


def gemma(r: Reader) -> Fields:
    return llama(r, head_dim=256, tied=True, activation="gelu_pytorch_tanh") | {"activation": "gelu_tanh"}


def gemma2(r: Reader) -> Fields:
    return gemma(r) | {"norm_placement": "both"}


def gemma3(r: Reader) -> Fields:
    return gemma2(r) | {"qk_norm": "head"}


def phi(r: Reader) -> Fields:
    fields = shapes(r, activation="gelu_new") | {"ffn": r.size("intermediate_size")}
    normed = {"qk_norm": "head"} if r.flag("qk_layernorm", False) else {}
    r.flag("bias", True), r.flag("lm_head_bias", True)
    return fields | {
        "norm": "layernorm", "parallel": "one-norm", "gated": False, "qkv_bias": True, "output_bias": True,
        "mlp_bias": True, "head_bias": True, "partial_rotary": True,
    } | normed  # fmt: skip


def gpt2(r: Reader) -> Fields:
    fields = shapes(r, grouped=False, tied=True, activation="gelu_new")
    fields["max_positions"] = r.size("n_positions", "n_ctx", "max_position_embeddings", default=1024)
    return fields | {
        "ffn": r.size("n_inner", default=4 * fields["hidden"]), "norm": "layernorm", "positions": "learned",
        "gated": False, "qkv_bias": True, "output_bias": True, "mlp_bias": True,
    }  # fmt: skip


def gpt_neox(r: Reader) -> Fields:
    biased = r.flag("attention_bias", True)
    return shapes(r, grouped=False, activation="gelu") | {
        "ffn": r.size("intermediate_size"), "norm": "layernorm", "gated": False, "qkv_bias": biased,
        "output_bias": biased, "mlp_bias": True, "partial_rotary": r.number("rotary_pct", 0.25) != 1.0,
        "parallel": "two-norms" if r.flag("use_parallel_residual", True) else "no",
    }  # fmt: skip


def gptj(r: Reader) -> Fields:
    fields = shapes(r, grouped=False, activation="gelu_new")
    return fields | {
        "ffn": r.size("n_inner", default=4 * fields["hidden"]), "norm": "layernorm", "parallel": "one-norm",
        "gated": False, "mlp_bias": True, "head_bias": True, "partial_rotary": True,
    }  # fmt: skip


def opt(r: Reader) -> Fields:
    fields = shapes(r, grouped=False, tied=True, activation="relu")
    biased = r.flag("enable_bias", True)
    width = r.size("word_embed_proj_dim", default=fields["hidden"])
    if not r.flag("do_layer_norm_before", True):
        raise SpecError("model", "config.do_layer_norm_before=false (OPT-350m's post-norm block) is not supported")
    return fields | {
        "ffn": r.size("ffn_dim"), "norm": "layernorm", "positions": "learned", "position_offset": 2, "gated": False,
        "qkv_bias": biased, "output_bias": biased, "mlp_bias": biased,
        "embedding_width": width if width != fields["hidden"] else 0,
        "norm_affine": r.flag("layer_norm_elementwise_affine", True),
    }  # fmt: skip


def bloom(r: Reader) -> Fields:
    fields = shapes(r, grouped=False, tied=True, activation="gelu_new")
    return fields | {
        "ffn": 4 * fields["hidden"], "norm": "layernorm", "positions": "alibi", "gated": False, "qkv_bias": True,
        "output_bias": True, "mlp_bias": True, "embedding_norm": True,
    }  # fmt: skip


def falcon(r: Reader) -> Fields:
    fields = shapes(r, tied=True, activation="gelu")
    new, parallel = r.flag("new_decoder_architecture", False), r.flag("parallel_attn", True)
    heads, biased = fields["heads"], r.flag("bias", False)
    one = 1 if r.flag("multi_query", True) else heads
    two_norms = new and r.size("num_ln_in_parallel_attn", default=2) == 2
    return fields | {
        "ffn": r.size("ffn_hidden_size", "intermediate_size", default=4 * fields["hidden"]),
        "kv_heads": r.size("num_kv_heads", "num_key_value_heads", default=heads) if new else one,
        "norm": "layernorm", "gated": False, "qkv_bias": biased, "output_bias": biased, "mlp_bias": biased,
        "positions": "alibi" if r.flag("alibi", False) else "rope",
        "parallel": "two-norms" if two_norms else "one-norm" if new or parallel else "no",
    }  # fmt: skip


def mpt(r: Reader) -> Fields:
    fields = shapes(r, grouped=False, tied=True, activation="gelu")
    r.used.update(("no_bias", "learned_pos_emb", "attn_config", "norm_type", "embedding_fraction"))
    ratio = r.size("expansion_ratio", default=4)
    return fields | {
        "ffn": ratio * fields["hidden"], "norm": "layernorm", "norm_bias": False, "positions": "alibi", "gated": False,
        "notes": ("transformers' MPT has neither biases nor learned positions; llm-foundry can add both",),
    }  # fmt: skip


def olmo(r: Reader) -> Fields:
    return llama(r) | {"norm": "layernorm", "norm_affine": False}


def olmo2(r: Reader) -> Fields:
    return llama(r) | {"norm_placement": "post", "qk_norm": "width"}


def starcoder2(r: Reader) -> Fields:
    biased = r.flag("use_bias", True)
    return shapes(r, tied=True, activation="gelu_pytorch_tanh") | {
        "ffn": r.size("intermediate_size"), "norm": "layernorm", "gated": False, "qkv_bias": biased,
        "output_bias": biased, "mlp_bias": biased,
    }  # fmt: skip


def gpt_oss(r: Reader) -> Fields:
    fields = experts(r, llama(r), count="num_local_experts", width="intermediate_size")
    biased = r.flag("attention_bias", True)
    return fields | {"qkv_bias": biased, "output_bias": biased, "expert_bias": True, "sinks": True}


def llama4(r: Reader) -> Fields:
    fields = experts(r, llama(r), count="num_local_experts", width="intermediate_size")
    step = r.size("interleave_moe_layer_step", default=1)
    sparse = r.indices("moe_layers") or list(range(step - 1, fields["layers"], step))
    return fields | {
        "ffn": r.size("intermediate_size_mlp", default=fields["ffn"]), "shared_ffn": fields["ffn"],
        "dense_layers": fields["layers"] - len(sparse),
    }  # fmt: skip


def deepseek(r: Reader) -> Fields:
    fields = llama(r, head_dim=128)
    latent = Latent(
        query_rank=r.size("q_lora_rank", default=0, least=0),
        kv_rank=r.size("kv_lora_rank"),
        plain_dim=r.size("qk_nope_head_dim"),
        rotary_dim=r.size("qk_rope_head_dim"),
        value_dim=r.size("v_head_dim"),
    )
    fields = experts(r, fields, count="n_routed_experts", width="moe_intermediate_size")
    return fields | {
        "latent": latent, "kv_heads": fields["heads"], "head_dim": latent.plain_dim + latent.rotary_dim,
        "shared_ffn": fields["expert_ffn"] * r.size("n_shared_experts", default=0, least=0),
        "dense_layers": min(r.size("first_k_dense_replace", default=0, least=0), fields["layers"]),
    }  # fmt: skip


DECODERS: dict[str, Row] = {
    "llama": llama, "mistral": llama, "ministral": llama, "phi3": llama, "granite": llama, "qwen2": qwen2,
    "qwen2_moe": qwen2_moe, "qwen3": qwen3, "qwen3_moe": qwen3_moe, "mixtral": mixtral, "gemma": gemma,
    "gemma2": gemma2, "gemma3_text": gemma3, "phi": phi, "gpt2": gpt2, "gpt_neox": gpt_neox, "gptj": gptj, "opt": opt,
    "bloom": bloom, "falcon": falcon, "mpt": mpt, "olmo": olmo, "olmo2": olmo2, "starcoder2": starcoder2,
    "gpt_oss": gpt_oss, "llama4_text": llama4, "deepseek_v2": deepseek, "deepseek_v3": deepseek,
}  # fmt: skip

NESTED = {
    "llama4": "llama4_text",
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2",
    "llava": "llama",
}
"""Multimodal types whose language model is in `text_config`, and that model's type where it does not say."""


def from_config(config: Mapping[str, Any], name: str) -> Architecture:
    """A Hugging Face config object as an Architecture.

    Raises SpecError (field `model`) naming the config's field that is missing, of the wrong kind or impossible.
    """
    whole, notes, config, kind = config, [], *_text_config(config)
    reader = Reader(config)
    if kind in OTHERS:
        return replace(OTHERS[kind](reader, name), config=whole, model_type=kind)
    if kind not in DECODERS:
        known = ", ".join([*DECODERS, *NESTED, *OTHERS])
        raise SpecError("model", f"config.model_type {kind[:40]!r} is not known; one of {known}")
    fields = DECODERS[kind](reader)
    fields |= sliding_window(reader, kind, fields["layers"])
    if whole is not config:
        notes.append(f"only the language model of {kind} is counted (text_config)")
    notes += [f"config field {field[:60]} ignored" for field in reader.ignored()]
    fields["notes"] = (*fields.get("notes", ()), *notes)
    fields["rope_theta"] = reader.number("rope_theta", 10000.0)
    arch = Architecture(name, **fields, model_type=kind, config=whole)
    if arch.parameters > LARGEST_SHAPE:
        raise SpecError("model", f"{arch.parameters:.2e} parameters; at most {LARGEST_SHAPE:.0e}")
    if not runs_in_our_decoder(arch):
        return replace(arch, style="other")
    return replace(arch, style="gpt" if arch.positions == "learned" else "llama")


def _text_config(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The language model's own config and type; multimodal configs nest it."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise SpecError("model", "config.model_type is missing or no string")
    nested = config.get("text_config")
    if kind in NESTED and nested is not None:
        if not isinstance(nested, Mapping):
            raise SpecError("model", "config.text_config must be an object")
        inner = nested.get("model_type", NESTED[kind])
        if not isinstance(inner, str):
            raise SpecError("model", "config.text_config.model_type must be a string")
        return nested, inner
    return config, NESTED.get(kind, kind) if kind in NESTED else kind
