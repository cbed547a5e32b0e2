"""Every parameter tensor of a decoder, in the order of our decoder's `named_parameters`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.architecture.shapes import Architecture

OUTSIDE = "outside-blocks"


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: ranks of the compressed query (0 = none) and key-value, and head sizes
    (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1)."""

    query_rank: int
    kv_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """`count` parameter tensors of one shape."""

    name: str
    shape: tuple[int, ...]
    group: str
    count: int = 1
    routed: bool = False
    """Belongs to the routed experts."""

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def in_block(self) -> bool:
        return self.group != OUTSIDE


@lru_cache(1024)
def parameter_table(arch: Architecture) -> tuple[Parameter, ...]:
    """Every parameter tensor; a tied head is not repeated."""
    return tuple(p for p in _table(arch) if p.elements and p.count)


def _table(arch: Architecture) -> Iterator[Parameter]:
    layers, hidden = arch.layers, arch.hidden
    width = arch.embedding_width or hidden
    yield Parameter("embedding.weight", (arch.vocab, width), OUTSIDE)
    if arch.embedding_width:
        yield Parameter("embedding.project_in", (hidden, width), OUTSIDE)
        yield Parameter("embedding.project_out", (width, hidden), OUTSIDE)
    if arch.embedding_norm:
        yield from _norm(arch, "embedding_norm", OUTSIDE, 1)
    if arch.positions == "learned":
        yield Parameter("positions.weight", ((arch.max_positions or 0) + arch.position_offset, hidden), OUTSIDE)
    yield from _norm(arch, "attention_norm", "norms", layers)
    yield from _latent(arch, arch.latent) if arch.latent else _attention(arch)
    for name in _more_norms(arch):
        yield from _norm(arch, name, "norms", layers)
    yield from _mlps(arch)
    yield from _norm(arch, "norm", OUTSIDE, 1)
    if not arch.tied:
        yield Parameter("head.weight", (arch.vocab, width), OUTSIDE)
    if arch.head_bias:
        yield Parameter("head.bias", (arch.vocab,), OUTSIDE)


def _more_norms(arch: Architecture) -> tuple[str, ...]:
    """Norms of a block beside its first."""
    if arch.parallel != "no":
        return ("mlp_norm",) if arch.parallel == "two-norms" else ()
    if arch.norm_placement == "both":
        return "attention_post_norm", "mlp_norm", "mlp_post_norm"
    return ("mlp_norm",)


def _linear(
    name: str, rows: int, columns: int, group: str, bias: bool, count: int, *, routed: bool = False
) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (rows, columns), group, count, routed)
    if bias:
        yield Parameter(f"{name}.bias", (rows,), group, count, routed)


def _norm(arch: Architecture, name: str, group: str, count: int, width: int = 0) -> Iterator[Parameter]:
    if not arch.norm_affine:
        return
    yield Parameter(f"{name}.weight", (width or arch.hidden,), group, count)
    if arch.norm == "layernorm" and arch.norm_bias:
        yield Parameter(f"{name}.bias", (width or arch.hidden,), group, count)


def _attention(arch: Architecture) -> Iterator[Parameter]:
    layers = arch.layers
    yield from _linear("q", arch.query_width, arch.hidden, "qkv", arch.qkv_bias, layers)
    yield from _linear("k", arch.kv_width, arch.hidden, "qkv", arch.qkv_bias, layers)
    yield from _linear("v", arch.kv_width, arch.hidden, "qkv", arch.qkv_bias, layers)
    if arch.qk_norm != "none":
        each = arch.qk_norm == "head"
        yield from _norm(arch, "q_norm", "qkv", layers, arch.head_dim if each else arch.query_width)
        yield from _norm(arch, "k_norm", "qkv", layers, arch.head_dim if each else arch.kv_width)
    if arch.sinks:
        yield Parameter("sinks", (arch.heads,), "attention-core", layers)
    yield from _linear("attention.out", arch.hidden, arch.query_width, "attention-out", arch.output_bias, layers)


def _latent(arch: Architecture, latent: Latent) -> Iterator[Parameter]:
    layers, heads = arch.layers, arch.heads
    queries = heads * (latent.plain_dim + latent.rotary_dim)
    if latent.query_rank:
        yield from _linear("q_down", latent.query_rank, arch.hidden, "qkv", arch.qkv_bias, layers)
        yield from _norm(arch, "q_norm", "qkv", layers, latent.query_rank)
        yield from _linear("q_up", queries, latent.query_rank, "qkv", False, layers)
    else:
        yield from _linear("q", queries, arch.hidden, "qkv", False, layers)
    yield from _linear("kv_down", latent.kv_rank + latent.rotary_dim, arch.hidden, "qkv", arch.qkv_bias, layers)
    yield from _norm(arch, "kv_norm", "qkv", layers, latent.kv_rank)
    yield from _linear("kv_up", heads * (latent.plain_dim + latent.value_dim), latent.kv_rank, "qkv", False, layers)
    yield from _linear(
        "attention.out", arch.hidden, heads * latent.value_dim, "attention-out", arch.output_bias, layers
    )


def _mlps(arch: Architecture) -> Iterator[Parameter]:
    dense = arch.dense_layers if arch.experts else arch.layers
    sparse = arch.layers - dense
    yield from _mlp(arch, "mlp", arch.ffn, arch.mlp_bias, dense)
    if not arch.experts:
        return
    yield from _linear("router", arch.experts, arch.hidden, "mlp-in", arch.expert_bias, sparse)
    yield from _mlp(arch, "expert", arch.expert_ffn, arch.expert_bias, sparse * arch.experts, routed=True)
    if arch.shared_ffn:
        yield from _mlp(arch, "shared", arch.shared_ffn, False, sparse)
    if arch.shared_gate:
        yield from _linear("shared.gate_scalar", 1, arch.hidden, "mlp-in", False, sparse)


def _mlp(
    arch: Architecture, name: str, width: int, bias: bool, count: int, *, routed: bool = False
) -> Iterator[Parameter]:
    yield from _linear(f"{name}.up", width, arch.hidden, "mlp-in", bias, count, routed=routed)
    if arch.gated:
        yield from _linear(f"{name}.gate", width, arch.hidden, "mlp-in", bias, count, routed=routed)
    yield from _linear(f"{name}.down", arch.hidden, width, "mlp-out", bias, count, routed=routed)
