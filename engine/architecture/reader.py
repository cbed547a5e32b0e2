"""Reads a Hugging Face config field by field: every value checked, every field that nobody read remembered."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine.errors import SpecError

MAX_SIZE = 2**24
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")  # what a layer of these families can do

NEUTRAL = frozenset(
    re.findall(
        r"\w+",
        """
    model_type architectures torch_dtype dtype transformers_version use_cache initializer_range bos_token_id
    eos_token_id pad_token_id unk_token_id decoder_start_token_id attention_dropout hidden_dropout resid_pdrop
    embd_pdrop attn_pdrop embed_dropout hidden_dropout_prob attention_probs_dropout_prob classifier_dropout dropout
    layerdrop rope_scaling rope_parameters rope_theta rope_local_base_freq layer_norm_epsilon layer_norm_eps
    rms_norm_eps norm_epsilon layer_types use_sliding_window max_window_layers sliding_window sliding_window_pattern
    _sliding_window_pattern attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar hidden_act
    hidden_activation activation_function quantization_config task_specific_params summary_type summary_use_proj
    summary_activation summary_first_dropout summary_proj_to_labels n_ctx auto_map name_or_path scale_attn_weights
    scale_attn_by_inverse_layer_idx reorder_and_upcast_attn output_router_logits router_aux_loss_coef
    router_jitter_noise norm_topk_prob scoring_func topk_method topk_group n_group routed_scaling_factor
    aux_loss_alpha seq_aux max_position_embeddings original_max_position_embeddings pretraining_tp
    attention_chunk_size no_rope_layers no_rope_layer_interval attn_temperature_tuning attn_scale floor_scale
    use_qk_norm swiglu_limit initial_context_length experts_per_token init_std activation_dropout init_device
    logit_scale resid_pdrop emb_pdrop rotary_dim rotary_pct rotary_emb_base partial_rotary_factor
    use_bidirectional_attention cache_implementation return_dict id2label label2id is_decoder
    num_ln_in_parallel_attn alibi skip_bias_add slow_but_exact masked_softmax_fusion seq_length offset_alibi
    attention_softmax_in_fp32 bias_dropout_fusion apply_residual_connection_post_layernorm unk_token
    use_parallel_residual gradient_checkpointing moe_layers num_mtp_modules num_nextn_predict_layers ep_size
    sliding_window_size is_encoder_decoder type_vocab_size relative_attention_max_distance tie_encoder_decoder
    clip_qkv prefix chunk_size_feed_forward problem_type
    """,
    )
)
"""Fields that change no shape."""


class Reader:
    """One config object. Raises SpecError (field `model`) naming the config's field at fault."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.used: set[str] = set()

    def _find(self, names: tuple[str, ...]) -> tuple[str, Any]:
        self.used.update(names)
        for name in names:
            if self.config.get(name) is not None:
                return name, self.config[name]
        return names[0], None

    def size(self, *names: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE) -> int:
        """An integer from `least` to `most` under the first of `names` that is there."""
        name, value = self._find(names)
        if value is None:
            if default is None:
                raise SpecError("model", f"config.{name} is missing")
            return default
        if type(value) is not int or not least <= value <= most:
            raise SpecError("model", f"config.{name} must be an integer from {least} to {most}, not {_short(value)}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A boolean, or the default where it is absent or null."""
        _, value = self._find((name,))
        if value is None:
            return default
        if type(value) is not bool:
            raise SpecError("model", f"config.{name} must be true or false, not {_short(value)}")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive finite number, or the default."""
        _, value = self._find((name,))
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise SpecError("model", f"config.{name} must be a positive number, not {_short(value)}")
        return float(value)

    def text(self, *names: str, default: str) -> str:
        """A string under the first of `names` that is there."""
        name, value = self._find(names)
        if value is None:
            return default
        if not isinstance(value, str):
            raise SpecError("model", f"config.{name} must be a string, not {_short(value)}")
        return value

    def indices(self, name: str) -> list[int]:
        """A list of layer numbers; absent is empty."""
        _, value = self._find((name,))
        if value is None:
            return []
        if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
            raise SpecError("model", f"config.{name} must be a list of layer numbers, not {_short(value)}")
        return value

    def layer_types(self, layers: int) -> list[str]:
        """How each layer attends; absent is empty."""
        _, value = self._find(("layer_types",))
        if value is None:
            return []
        if not isinstance(value, list) or len(value) != layers or not all(item in ATTENTION for item in value):
            known = ", ".join(ATTENTION)
            raise SpecError("model", f"config.layer_types must name one of {known} for each of the {layers} layers")
        return value

    def ignored(self) -> list[str]:
        """Fields that were neither read nor known to change no shape."""
        return sorted(
            str(name) for name in self.config if name not in self.used | NEUTRAL and not str(name).startswith("_")
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
