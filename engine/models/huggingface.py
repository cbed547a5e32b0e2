"""Any transformers language model from its config object: random weights, no network, no remote code. Extra `hf`.

The class is transformers' own, so what it keeps for backward is what a user's training run keeps. A causal LM is built
where the family has one; an encoder becomes its masked LM, an encoder-decoder its sequence-to-sequence LM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.architecture import Architecture
from engine.attention import Kernel
from engine.errors import SpecError, UnsupportedError

DROPOUT_FIELDS = (
    "attention_dropout", "attention_probs_dropout_prob", "attn_dropout", "attn_pdrop", "dropout", "dropout_rate",
    "embd_pdrop", "emb_dropout", "embedding_dropout", "embed_pdrop", "hidden_dropout", "hidden_dropout_prob",
    "resid_dropout", "resid_pdrop", "residual_dropout",
)  # fmt: skip
"""What transformers' families call dropout; each is set to the spec's, so that nothing hides in a class default."""

RENAMED = {"falcon": {"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"}}
"""Fields that a family's class spells in its own way, by model_type."""

SMALL_LIST_SHARE = 0.1  # a ModuleList with fewer parameters than this share of the largest is no stack of blocks


class HuggingFaceModel(nn.Module):
    """tokens (B, S) -> final hidden states (B, S, d); with targets (B, S), transformers' own loss."""

    def __init__(self, model: nn.Module, notes: list[str]) -> None:
        super().__init__()
        self.inside = model
        self.notes = notes
        self.block_lists = block_lists(model)

    @property
    def head_weight(self) -> Tensor:
        """(V, d). Raises UnsupportedError where logits are not just hidden @ weightᵀ."""
        head: Any = self.inside.get_output_embeddings()  # type: ignore[operator]  # a PreTrainedModel
        config: Any = self.inside.config
        name = type(self.inside).__name__
        if head is None or config.is_encoder_decoder:
            raise UnsupportedError("loss_chunks", f"{name} has no plain head over hidden states: use loss_chunks=1")
        if getattr(head, "bias", None) is not None or getattr(config, "final_logit_softcapping", None):
            raise UnsupportedError(
                "loss_chunks", f"{name}'s logits have a bias or a soft cap, which the chunked loss lacks: use 1"
            )
        weight: Tensor = head.weight
        return weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """A causal LM's loss shifts its labels by one itself: only the labels differ, never a shape. Both ways are
        calls of this module, since FSDP2 gathers what is outside the blocks when it is called."""
        if targets is not None:
            config: Any = self.inside.config
            options = {} if config.is_encoder_decoder else {"use_cache": False}
            loss: Tensor = self.inside(input_ids=tokens, labels=targets, **options).loss
            return loss
        prefix: Any = self.inside.base_model_prefix
        base: Any = getattr(self.inside, prefix)
        hidden: Tensor = base(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden


def block_lists(model: nn.Module) -> list[nn.ModuleList]:
    """The stacks of transformer blocks, outermost ModuleLists in order (an encoder-decoder has two)."""
    found = [
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)
    ]
    outermost = [
        (sum(p.numel() for p in module.parameters()), module)
        for name, module in found
        if not any(name.startswith(other + ".") for other, _ in found)
    ]
    largest = max((count for count, _ in outermost), default=0)
    stacks = [module for count, module in outermost if count > SMALL_LIST_SHARE * largest]
    if not stacks:
        raise UnsupportedError("model", f"{type(model).__name__} has no list of blocks that a policy could wrap")
    return stacks


def build_huggingface(
    arch: Architecture, *, attention: str, kernel: Kernel, dropout: float, dtype: torch.dtype, device: torch.device,
    initialise: bool = True,
) -> HuggingFaceModel:  # fmt: skip
    """The transformers model of `arch.config`, weights in `dtype` on `device`, initialised as its class does from
    torch's current seed, or (for fake tensors) not at all.

    Raises UnsupportedError without the extra `hf`, or where transformers has no class for the config.
    """
    transformers = _transformers()
    config = transformers_config(arch)
    dropped = _set_dropout(config, dropout)
    cls = model_class(config)
    notes = [_choose_attention(config, cls, attention, kernel)]
    if dropout and not dropped:
        notes.append(f"dropout: {cls.__name__} has none")
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = cls(config) if initialise else _uninitialised(transformers, cls, config)
    finally:
        torch.set_default_dtype(default)
    notes.append(f"model: run as transformers' {cls.__name__} {transformers.__version__}, with its own loss")
    return HuggingFaceModel(model, [note for note in notes if note])


def _set_dropout(config: Any, dropout: float) -> bool:
    """Whether the class has any. MPT keeps one of its rates in a config of the attention's own, which takes no
    fraction if asked."""
    places = [(part, name) for part in (config, getattr(config, "attn_config", None)) for name in DROPOUT_FIELDS]
    found = [(part, name) for part, name in places if isinstance(getattr(part, name, None), float | int)]
    for part, name in found:
        vars(part)[name] = dropout
    return bool(found)


def _transformers() -> Any:
    try:
        import transformers
        from transformers.utils import logging
    except ImportError as error:
        raise UnsupportedError(
            "model", "this model runs as its transformers class, which needs the extra: pip install 'remat[hf]'"
        ) from error
    logging.set_verbosity_error()
    return transformers


def _uninitialised(transformers: Any, cls: type[nn.Module], config: Any) -> nn.Module:
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = cls(config)
    model.tie_weights()  # type: ignore[operator]  # a PreTrainedModel; it ties when it initialises
    return model


def transformers_config(arch: Architecture) -> Any:
    """transformers' config object. What the file leaves out comes from the class's defaults; a field that the class
    computes itself is left to it. Nested `text_config`s are taken alone: images cost nothing here."""
    transformers = _transformers()
    source = arch.config if arch.config is not None else gpt_or_llama_config(arch)
    kind = source.get("model_type", arch.model_type)
    if kind not in transformers.CONFIG_MAPPING:
        raise UnsupportedError("model", f"transformers {transformers.__version__} has no model_type {kind!r}")
    cls = transformers.CONFIG_MAPPING[kind]
    renamed = RENAMED.get(kind, {})
    fields = {
        renamed.get(key, key): value
        for key, value in source.items()
        if not key.startswith("_") and key not in ("model_type", "quantization_config") and not _is_computed(cls, key)
    }
    try:
        config = cls(**fields).get_text_config()
    except Exception as error:  # a user's config meets each class's own checks, and their own exceptions
        reason = " ".join(str(error).split())[:200]
        raise SpecError("model", f"transformers' {cls.__name__} refuses this config: {reason}") from error
    config.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id or 0
    return config


def _is_computed(cls: type, key: str) -> bool:
    attribute = getattr(cls, key, None)
    return isinstance(attribute, property) and attribute.fset is None


def gpt_or_llama_config(arch: Architecture) -> Mapping[str, Any]:
    """The config of a made-up GPT or LLaMA shape, for comparing our decoder with transformers' class."""
    if arch.style == "gpt":
        return {
            "model_type": "gpt2", "n_layer": arch.layers, "n_embd": arch.hidden, "n_head": arch.heads,
            "n_inner": arch.ffn, "vocab_size": arch.vocab, "n_positions": arch.max_positions or 1024,
        }  # fmt: skip
    return {
        "model_type": "llama", "num_hidden_layers": arch.layers, "hidden_size": arch.hidden,
        "num_attention_heads": arch.heads, "num_key_value_heads": arch.kv_heads, "head_dim": arch.head_dim,
        "intermediate_size": arch.ffn, "vocab_size": arch.vocab, "tie_word_embeddings": arch.tied,
    }  # fmt: skip


def model_class(config: Any) -> Any:
    """The language-model class of a config: masked for an encoder, sequence-to-sequence, or causal.

    Raises UnsupportedError if transformers has none.
    """
    from transformers.models.auto import modeling_auto as auto

    encoder = not getattr(config, "is_decoder", True) and not config.is_encoder_decoder
    mappings = [auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING]
    if encoder:
        mappings.insert(0, auto.MODEL_FOR_MASKED_LM_MAPPING)
    for mapping in mappings:
        if type(config) in mapping:
            return mapping[type(config)]
    raise UnsupportedError("model", f"transformers has no language-model class for model_type {config.model_type!r}")


def _choose_attention(config: Any, cls: Any, attention: str, kernel: Kernel) -> str:
    """Set the config's attention implementation; a note where it isn't the one asked for."""
    if attention == "standard":
        config._attn_implementation = "eager"
        return ""
    foreign = getattr(cls, "_supports_attention_backend", False)
    if attention == "flash":
        if not getattr(cls, "_supports_sdpa", False):
            config._attn_implementation = "eager"
            return f"attention=flash: {cls.__name__} has no SDPA path; the scores are materialised (eager)"
        config._attn_implementation = register_sdpa() if foreign else "sdpa"
        return ""
    if not foreign:
        raise UnsupportedError("attention", f"{cls.__name__} takes no foreign kernel; use flash or standard")
    if getattr(config, "attn_logit_softcapping", None) or getattr(config, "sliding_window", None):
        raise UnsupportedError(
            "attention",
            f"{attention} has neither soft cap nor sliding window, which {cls.__name__} needs; use standard",
        )
    config._attn_implementation = register_kernel(kernel)
    return kernel.note


def register_sdpa() -> str:
    """transformers' SDPA path with the mask of unpacked sequences, always; the name to give a config.

    Its own mask reads the positions' values to see whether sequences are packed. Fake tensors have no values, so it
    would assume so, build a mask, and leave the fused kernel.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    def mask(*, kv_length: int, local_size: int | None = None, **options: Any) -> Tensor | None:
        if local_size is None or kv_length < local_size:
            return None
        windowed: Tensor | None = sdpa_mask(kv_length=kv_length, local_size=local_size, **options)
        return windowed

    AttentionInterface.register("remat-sdpa", sdpa_attention_forward)
    AttentionMaskInterface.register("remat-sdpa", mask)
    return "remat-sdpa"


def register_kernel(kernel: Kernel) -> str:
    """Make a kernel of ours known to transformers; the name to give a config."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    name = f"remat-{kernel.name}"
    AttentionInterface.register(name, _adapter(kernel))
    AttentionMaskInterface.register(name, lambda *_arguments, **_options: None)
    return name


def _adapter(kernel: Kernel) -> Callable[..., tuple[Tensor, None]]:
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
        scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """transformers' attention function: heads come as (B, H, S, D) and leave as (B, S, H, D)."""
        wanted = scaling if scaling is not None else query.shape[-1] ** -0.5
        if abs(wanted * query.shape[-1] ** 0.5 - 1) > 1e-6:
            query = query * (wanted * query.shape[-1] ** 0.5)
        causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
        return kernel(query, key, value, causal=causal, dropout=dropout).transpose(1, 2), None

    return attend
