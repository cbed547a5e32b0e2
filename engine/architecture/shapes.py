"""Architecture: the shapes of a transformer. Parameter tensors follow from it (`parameters.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from engine.architecture.parameters import Latent, parameter_table
from engine.errors import SpecError

MAX_DIMENSION = 2**24  # what no shape of a real model exceeds; keeps arithmetic and allocation sane
LARGEST_SHAPE = 10**13  # parameters
MAX_LAYERS = 2**14  # nested policies are walked block by block, on the page that asks

Family = Literal["decoder", "encoder", "encoder-decoder", "state-space", "unknown"]


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
    family: Family = "decoder"
    """The closed form knows `decoder` only."""
    max_positions: int | None = None
    """Longest sequence a learned position table (or the model's stated limit) allows; None = grows as asked."""
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    norm_epsilon: float = 1e-5
    norm_bias: bool = True
    """A LayerNorm has a bias beside its weight."""
    norm_affine: bool = True
    """Norms have parameters at all."""
    norm_placement: Literal["pre", "post", "both"] = "pre"
    """Before each branch, after it, or both."""
    parallel: Literal["no", "one-norm", "two-norms"] = "no"
    """Attention and MLP read the same input, through one norm or one each."""
    qk_norm: Literal["none", "head", "width"] = "none"
    """A norm on queries and keys, over each head or over the whole projection."""
    positions: Literal["learned", "rope", "alibi", "none"] = "rope"
    position_offset: int = 0
    """Rows of the position table before position 0 (OPT has 2)."""
    partial_rotary: bool = False
    rope_theta: float = 10000.0
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "silu"
    gated: bool = True
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    embedding_norm: bool = False
    embedding_width: int = 0
    """Width of the embedding where it differs from `hidden` and is projected; 0 = the same."""
    experts: int = 0
    """Routed experts a layer; 0 = dense."""
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    """FFN width of what every token runs beside the routed experts."""
    shared_gate: bool = False
    expert_bias: bool = False
    """Experts and router have biases."""
    dense_layers: int = 0
    """Layers of a mixture-of-experts model that have one dense MLP of width `ffn`."""
    sinks: bool = False
    """One learned attention sink a head."""
    latent: Latent | None = None
    """Multi-head latent attention (DeepSeek)."""
    sliding_window: int | None = None
    """Tokens that a sliding layer attends to."""
    sliding_layers: int = 0
    counted: int | None = None
    """Exact parameter count where the decoder's table does not describe the model."""
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
            most = MAX_LAYERS if name == "layers" else MAX_DIMENSION
            if type(value) is not int or not 1 <= value <= most:
                raise SpecError("model", f"{name} must be an integer from 1 to {most}, not {value!r}")
        if self.heads % self.kv_heads:
            raise SpecError("model", f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise SpecError(
                "model", f"experts per token ({self.experts_per_token}) must be from 1 to the {self.experts} experts"
            )
        if self.dense_layers > self.layers:
            raise SpecError("model", f"dense layers ({self.dense_layers}) must be at most the {self.layers} layers")

    @property
    def runs_transformers(self) -> bool:
        """The real transformers class runs: a style that our decoder does not have, or the user's own config."""
        return self.style == "other" or self.from_user

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
        """Parameters of one norm over the hidden width."""
        vectors = 2 if self.norm == "layernorm" and self.norm_bias else 1
        return self.hidden * vectors if self.norm_affine else 0

    @property
    def block_parameters(self) -> int:
        """Parameters of one block (the mean, where blocks differ)."""
        return sum(p.elements * p.count for p in parameter_table(self) if p.in_block) // self.layers

    @property
    def parameters(self) -> int:
        """Exact parameter count; a tied head is counted once."""
        if self.counted is not None:
            return self.counted
        return sum(p.elements * p.count for p in parameter_table(self))

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets: of the routed experts, only those chosen."""
        routed = sum(p.elements * p.count for p in parameter_table(self) if p.routed)
        return self.parameters - routed + (routed * self.experts_per_token // self.experts if self.experts else 0)

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


def runs_in_our_decoder(arch: Architecture) -> bool:
    """Whether `engine.models.decoder` has every part of the model."""
    plain = (
        arch.family == "decoder"
        and arch.norm_placement == "pre"
        and arch.parallel == "no"
        and arch.qk_norm == "none"
        and arch.positions in ("learned", "rope")
        and (arch.norm == "rmsnorm" or arch.norm_bias)
        and arch.norm_affine
        and arch.latent is None
    )
    extras = (
        arch.partial_rotary, arch.head_bias, arch.embedding_norm, arch.embedding_width, arch.experts, arch.sinks,
        arch.position_offset,
    )  # fmt: skip
    return plain and not any(extras)
