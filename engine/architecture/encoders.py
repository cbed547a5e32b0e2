"""Models that are no decoder-only transformers: shapes and exact counts, but no closed form of their memory."""

from __future__ import annotations

from collections.abc import Callable

from engine.architecture.reader import Reader
from engine.architecture.shapes import MAX_LAYERS, Architecture


def bert(r: Reader, name: str) -> Architecture:
    """Encoder with pooler (transformers' BertModel)."""
    hidden, layers = r.size("hidden_size"), r.size("num_hidden_layers", most=MAX_LAYERS)
    heads, ffn, vocab = r.size("num_attention_heads"), r.size("intermediate_size"), r.size("vocab_size")
    positions, types = r.size("max_position_embeddings"), r.size("type_vocab_size", default=2)
    block = 4 * (hidden * hidden + hidden) + 2 * hidden * ffn + ffn + hidden + 4 * hidden
    total = (vocab + positions + types) * hidden + 2 * hidden + layers * block + hidden * hidden + hidden
    return Architecture(
        name, layers, hidden, heads, heads, max(1, hidden // heads), ffn, vocab, style="other", family="encoder",
        max_positions=positions, norm="layernorm", norm_placement="post", positions="learned", activation="gelu",
        gated=False, tied=True, qkv_bias=True, output_bias=True, mlp_bias=True, counted=total,
    )  # fmt: skip


def t5(r: Reader, name: str) -> Architecture:
    """Encoder and decoder with relative position buckets (transformers' T5)."""
    hidden, heads, width = r.size("d_model"), r.size("num_heads"), r.size("d_kv")
    layers, ffn, vocab = r.size("num_layers"), r.size("d_ff"), r.size("vocab_size")
    decoders = r.size("num_decoder_layers", default=layers)
    gated = r.text("feed_forward_proj", default="relu").startswith("gated")
    attention, mlp = 4 * hidden * heads * width, (3 if gated else 2) * hidden * ffn
    buckets = 2 * r.size("relative_attention_num_buckets", default=32) * heads
    total = layers * (attention + mlp + 2 * hidden) + decoders * (2 * attention + mlp + 3 * hidden) + 2 * hidden
    total += buckets + vocab * hidden * (1 if r.flag("tie_word_embeddings", True) else 2)
    return Architecture(
        name, layers + decoders, hidden, heads, heads, width, ffn, vocab, style="other", family="encoder-decoder",
        positions="none", activation="relu", gated=gated, tied=r.flag("tie_word_embeddings", True), counted=total,
    )  # fmt: skip


def mamba(r: Reader, name: str) -> Architecture:
    """State-space model (transformers' Mamba)."""
    hidden, layers = r.size("hidden_size", "d_model"), r.size("num_hidden_layers", "n_layer", most=MAX_LAYERS)
    vocab, state = r.size("vocab_size"), r.size("state_size", default=16)
    inner = r.size("expand", default=2) * hidden
    kernel, rank = r.size("conv_kernel", default=4), r.size("time_step_rank", default=-(-hidden // 16))
    tied = r.flag("tie_word_embeddings", True)
    in_out = 3 * hidden * inner + (3 * inner if r.flag("use_bias", False) else 0)
    convolution = inner * kernel + (inner if r.flag("use_conv_bias", True) else 0)
    mixer = in_out + convolution + inner * (rank + 2 * state) + rank * inner + inner + inner * state + inner
    total = vocab * hidden * (1 if tied else 2) + layers * (mixer + hidden) + hidden
    return Architecture(
        name, layers, hidden, 1, 1, hidden, inner, vocab, style="other", family="state-space", positions="none",
        gated=False, tied=tied, counted=total,
    )  # fmt: skip


OTHERS: dict[str, Callable[[Reader, str], Architecture]] = {"bert": bert, "t5": t5, "mamba": mamba}
