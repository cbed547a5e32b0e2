"""A model's shapes and exact parameter count, from a preset, a made-up shape or a Hugging Face config. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from engine.catalog import model_configs
from engine.errors import SpecError

DEFAULT_VOCAB = 8192
MAX_DIMENSION = 2**24  # what no shape of a real model exceeds; keeps arithmetic and allocation sane
LARGEST_SHAPE = 10**13  # parameters

# (layers, hidden, heads, kv_heads, ffn, vocab, max_positions): shapes that no config file in the catalog holds.
_LLAMA_SHAPES: dict[str, tuple[int, int, int, int, int, int, int]] = {
    "llama-tiny": (4, 256, 8, 4, 688, DEFAULT_VOCAB, 0),
    "llama-7b": (32, 4096, 32, 32, 11008, 32000, 2048),  # Touvron et al. 2023, arXiv 2302.13971, table 2
    "llama-13b": (40, 5120, 40, 40, 13824, 32000, 2048),
    "llama-2-13b": (40, 5120, 40, 40, 13824, 32000, 4096),  # Touvron et al. 2023, arXiv 2307.09288
    "llama-2-70b": (80, 8192, 64, 8, 28672, 32000, 4096),
}
_GPT_SHAPES: dict[str, tuple[int, int, int, int]] = {"gpt-tiny": (4, 256, 4, DEFAULT_VOCAB)}


@dataclass(frozen=True, slots=True)
class Architecture:
    """The shapes of a decoder-only transformer. Defaults are LLaMA's."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    style: Literal["gpt", "llama", "other"] = "llama"
    """`gpt` and `llama` run in our own decoder; `other` needs the real transformers class."""
    max_positions: int | None = None
    """Longest sequence a learned position table (or the model's stated limit) allows; None = grows as asked."""
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    norm_epsilon: float = 1e-5
    positions: Literal["learned", "rope", "alibi", "none"] = "rope"
    rope_theta: float = 10000.0
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "silu"
    gated: bool = True
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    made_up: bool = False
    model_type: str = "llama"
    config: Mapping[str, Any] | None = field(default=None, compare=False)
    """The Hugging Face config it came from, if any: what `models.huggingface` builds the real class from."""
    from_user: bool = False
    """The config was handed in by the user (not a preset): simulated and measured with the real class."""
    notes: tuple[str, ...] = ()
    """What was assumed or ignored, for the result's warnings."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MAX_DIMENSION:
                raise SpecError("model", f"{name} must be an integer from 1 to {MAX_DIMENSION}, not {value!r}")
        if self.heads % self.kv_heads:
            raise SpecError("model", f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")

    @property
    def query_width(self) -> int:
        """Columns of the query projection: heads · head_dim."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the key (or value) projection: kv_heads · head_dim."""
        return self.kv_heads * self.head_dim

    @property
    def norm_parameters(self) -> int:
        return self.hidden * (2 if self.norm == "layernorm" else 1)

    @property
    def block_parameters(self) -> int:
        """Exact parameters of one block (dense; biases and norms counted)."""
        qkv = self.hidden * (self.query_width + 2 * self.kv_width)
        qkv += (self.query_width + 2 * self.kv_width) * self.qkv_bias
        out = self.query_width * self.hidden + self.hidden * self.output_bias
        mlp_in = self.hidden * self.ffn + self.ffn * self.mlp_bias
        mlp_out = self.ffn * self.hidden + self.hidden * self.mlp_bias
        return qkv + out + mlp_in * (2 if self.gated else 1) + mlp_out + 2 * self.norm_parameters

    @property
    def parameters(self) -> int:
        """Exact parameter count; a tied head is counted once."""
        embedding = self.vocab * self.hidden
        positions = (self.max_positions or 0) * self.hidden if self.positions == "learned" else 0
        head = 0 if self.tied else embedding
        return embedding + positions + self.layers * self.block_parameters + self.norm_parameters + head

    def for_sequence(self, tokens: int) -> Architecture:
        """This model able to take `tokens` positions. A made-up model's table grows to it.

        Raises SpecError if the model has a learned position table that is shorter.
        """
        if self.positions != "learned":
            return self
        if self.made_up:
            return replace(self, max_positions=max(tokens, self.max_positions or 0))
        if self.max_positions is not None and tokens > self.max_positions:
            raise SpecError("seq", f"{self.name} has {self.max_positions} learned positions, fewer than {tokens}")
        return self


def _gpt(name: str, layers: int, hidden: int, heads: int, vocab: int) -> Architecture:
    if hidden % heads:
        raise SpecError("model", f"hidden size {hidden} must be a multiple of the heads ({heads})")
    return Architecture(
        name, layers, hidden, heads, heads, hidden // heads, 4 * hidden, vocab,
        style="gpt", norm="layernorm", positions="learned", activation="gelu_tanh", gated=False, tied=True,
        qkv_bias=True, output_bias=True, mlp_bias=True, made_up=True, model_type="gpt2",
    )  # fmt: skip


def _llama(
    name: str, layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, positions: int = 0
) -> Architecture:
    if hidden % heads:
        raise SpecError("model", f"hidden size {hidden} must be a multiple of the heads ({heads})")
    if hidden // heads % 2:
        raise SpecError("model", f"head size {hidden // heads} must be even for rotary positions")
    return Architecture(
        name, layers, hidden, heads, kv, hidden // heads, ffn, vocab, max_positions=positions or None, made_up=True
    )


def _made_up(name: str) -> Architecture:
    """`gpt:L,d,a[,V]` or `llama:L,d,a,kv,f[,V]`."""
    family, _, shape = name.partition(":")
    wanted = {"gpt": (3, 4, "gpt:L,d,a[,V]"), "llama": (5, 6, "llama:L,d,a,kv,f[,V]")}[family]
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", shape) or shape.count(",") + 1 not in wanted[:2]:
        raise SpecError("model", f"{name[:80]!r} is not of the form {wanted[2]} (integers)")
    numbers = [int(number) for number in shape.split(",")]
    if 0 in numbers:
        raise SpecError("model", f"{name[:80]!r}: every size must be at least 1")
    if len(numbers) == wanted[0]:
        numbers.append(DEFAULT_VOCAB)
    made = _gpt(name, *numbers) if family == "gpt" else _llama(name, *numbers)
    if made.parameters > LARGEST_SHAPE:
        raise SpecError("model", f"{name[:80]!r} has {made.parameters:.2e} parameters; at most {LARGEST_SHAPE:.0e}")
    return made


def presets() -> tuple[str, ...]:
    """Every preset name: CPU-sized first, then the catalog."""
    return tuple(dict.fromkeys([*_GPT_SHAPES, *_LLAMA_SHAPES, *model_configs()]))


@cache
def _preset(name: str) -> Architecture:
    if name in _GPT_SHAPES:
        return _gpt(name, *_GPT_SHAPES[name])
    if name in _LLAMA_SHAPES:
        return _llama(name, *_LLAMA_SHAPES[name])
    if name in model_configs():
        return from_config(model_configs()[name], name)
    if name.startswith(("gpt:", "llama:")):
        return _made_up(name)
    raise SpecError(
        "model",
        f"unknown model {name[:80]!r}; a preset ({', '.join(presets())}), gpt:L,d,a[,V], llama:L,d,a,kv,f[,V], "
        "or a Hugging Face config.json",
    )


def resolve_model(model: str | Mapping[str, Any]) -> Architecture:
    """The architecture of a spec's `model`. Raises SpecError naming the field at fault."""
    if isinstance(model, str):
        return _preset(model)
    return replace(_from_config_text(json.dumps(model, sort_keys=True)), from_user=True)


@cache
def _from_config_text(text: str) -> Architecture:
    return from_config(json.loads(text), "config.json")


def from_config(config: Mapping[str, Any], name: str) -> Architecture:
    """A Hugging Face config object as an Architecture."""
    kind = config.get("model_type")
    if kind == "gpt2":
        made = _gpt(name, config["n_layer"], config["n_embd"], config["n_head"], config["vocab_size"])
        return replace(made, max_positions=config.get("n_positions", 1024), made_up=False, config=config)
    if kind in ("llama", "mistral"):
        heads = config["num_attention_heads"]
        return Architecture(
            name, config["num_hidden_layers"], config["hidden_size"], heads,
            config.get("num_key_value_heads", heads), config.get("head_dim") or config["hidden_size"] // heads,
            config["intermediate_size"], config["vocab_size"], max_positions=config.get("max_position_embeddings"),
            tied=config.get("tie_word_embeddings", False), model_type=kind, config=config,
        )  # fmt: skip
    raise SpecError("model", f"model_type {kind!r} is not supported yet")
