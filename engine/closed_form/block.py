"""The tapes of one decoder block and of the embedding: what `engine.models.decoder` runs, and for architectures that
only transformers has, the same ops on their shapes."""

from __future__ import annotations

from functools import lru_cache

from engine.closed_form.attention import attention_core
from engine.closed_form.mlp import mlp
from engine.closed_form.ops import Context, add, context_of, dropout, linear, norm
from engine.closed_form.tape import OUTSIDE, Op, Tape, Tensor
from engine.recipes import DTYPE_BYTES

__all__ = ["Context", "block_tape", "context_of", "embedding_tape"]


def attention(tape: Tape, context: Context, x: Tensor) -> Tensor:
    """Projections, core and output projection of x (B, S, d)."""
    arch = context.arch
    q, k, v = latent_projections(tape, context, x) if arch.latent else projections(tape, context, x)
    mixed = attention_core(tape, context, q, k, v)
    out = linear(
        tape, context, mixed, "attention.out", arch.hidden, "attention-out", bias=arch.output_bias, formula="B·S·d"
    )
    tape.hold(x, mixed)
    return out


def projections(tape: Tape, context: Context, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, S, H·D), k and v (B, S, K·D), with their norms where the model has them."""
    arch = context.arch
    q = linear(tape, context, x, "q", arch.query_width, "qkv", bias=arch.qkv_bias, formula="B·S·H·D")
    k = linear(tape, context, x, "k", arch.kv_width, "qkv", bias=arch.qkv_bias, formula="B·S·K·D")
    v = linear(tape, context, x, "v", arch.kv_width, "qkv", bias=arch.qkv_bias, formula="B·S·K·D")
    if arch.qk_norm == "head":
        q = norm(tape, context, q, "q_norm", "norms", per_row=arch.heads, parameters=arch.head_dim)
        k = norm(tape, context, k, "k_norm", "norms", per_row=arch.kv_heads, parameters=arch.head_dim)
    elif arch.qk_norm == "width":
        q = norm(tape, context, q, "q_norm", "norms", parameters=arch.query_width)
        k = norm(tape, context, k, "k_norm", "norms", parameters=arch.kv_width)
    return q, k, v


def latent_projections(tape: Tape, context: Context, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Multi-head latent attention in training: queries and keys-values through compressed vectors, then whole."""
    arch, latent = context.arch, context.arch.latent
    assert latent is not None
    width = latent.plain_dim + latent.rotary_dim
    source = x
    if latent.query_rank:
        down = linear(tape, context, x, "q_down", latent.query_rank, "qkv", bias=False, formula="B·S·rank")
        source = norm(tape, context, down, "q_norm", "norms", parameters=latent.query_rank)
    q = linear(tape, context, source, "q", arch.heads * width, "qkv", bias=False, formula="B·S·H·D")
    ranks = latent.kv_rank + latent.rotary_dim
    down = linear(tape, context, x, "kv_down", ranks, "qkv", bias=False, formula="B·S·rank")
    source = norm(tape, context, down, "kv_norm", "norms", parameters=latent.kv_rank)
    k = linear(tape, context, source, "k", arch.heads * width, "qkv", bias=False, formula="B·S·H·D")
    v = linear(tape, context, source, "v", arch.heads * latent.value_dim, "qkv", bias=False, formula="B·S·H·Dv")
    return q, k, v


@lru_cache(1024)
def block_tape(context: Context) -> Tape:
    """x + attention(norm(x)), then x + mlp(norm(x)); or both branches of one x. Its one input is `x` (B, S, d)."""
    tape = Tape()
    x = tape.input(context.stream("x", "norms"))
    _parallel(tape, context, x) if context.arch.parallel != "no" else _sequential(tape, context, x)
    return tape


def _sequential(tape: Tape, context: Context, x: Tensor) -> None:
    before, after = context.arch.norm_placement != "post", context.arch.norm_placement != "pre"
    normed = norm(tape, context, x, "attention_norm", "norms") if before else x
    branch = attention(tape, context, normed)
    if after:
        branch = norm(tape, context, branch, "attention_post_norm", "norms")
    branch = dropout(tape, context, branch, "attention.out_dropped")
    middle = add(tape, context, x, branch, "x_middle", "attention-out")
    normed = norm(tape, context, middle, "mlp_norm", "norms") if before else middle
    branch = mlp(tape, context, normed)
    if after:
        branch = norm(tape, context, branch, "mlp_post_norm", "norms")
    add(tape, context, middle, dropout(tape, context, branch, "mlp.out_dropped"), "x_out", "mlp-out")
    tape.hold(middle)


def _parallel(tape: Tape, context: Context, x: Tensor) -> None:
    normed = norm(tape, context, x, "attention_norm", "norms")
    mixed = dropout(tape, context, attention(tape, context, normed), "attention.out_dropped")
    if context.arch.parallel == "two-norms":
        normed = norm(tape, context, x, "mlp_norm", "norms")
    inner = dropout(tape, context, mlp(tape, context, normed), "mlp.out_dropped")
    both = add(tape, context, mixed, inner, "branches", "mlp-out")
    add(tape, context, both, x, "x_out", "mlp-out")


@lru_cache(1024)
def embedding_tape(context: Context) -> Tape:
    """Token (and learned position) embedding, then dropout. It keeps the tokens."""
    arch, size = context.arch, DTYPE_BYTES[context.weight]
    tape = Tape()
    shape = (context.batch, context.seq)
    tape.input(Tensor("tokens", shape, "int64", OUTSIDE, "B·S", differentiable=False))
    x = tape.add(
        Op("embedding", OUTSIDE, reads=("tokens",), makes=(context.stream("embedded", OUTSIDE),), saves=("tokens",),
           weights=(("embedding.weight", arch.vocab * arch.hidden * size),))
    )  # fmt: skip
    if arch.positions == "learned":
        rows = arch.max_positions or context.seq
        op = Op(
            "positions", OUTSIDE, reads=(x.name,), makes=(context.stream("positioned", OUTSIDE),), passes=True,
            weights=(("positions.weight", rows * arch.hidden * size),),
        )  # fmt: skip
        x = tape.add(op)
    dropout(tape, context, x, "embedding.dropped")
    return tape
