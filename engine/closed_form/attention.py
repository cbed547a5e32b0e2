"""The attention core's tape by kernel: rotary embedding, scores, softmax and their product with the values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.closed_form.tape import Op, Tape, Tensor

if TYPE_CHECKING:
    from engine.closed_form.ops import Context

CORE = "attention-core"


def attention_core(tape: Tape, context: Context, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, S, H·D) queries and (B, S, K·D) keys and values -> (B, S, H·D)."""
    if context.arch.positions == "rope":
        raw = (q, k)
        q, k = rotary(tape, context, q), rotary(tape, context, k)
        tape.hold(*raw)
    kernel = KERNELS[kernel_name(context)]
    return kernel(tape, context, q, k, v)


def rotary(tape: Tape, context: Context, x: Tensor) -> Tensor:
    """x·cos + rotated(x)·sin. The tables are buffers; nothing of x is saved."""
    dtype = "fp32" if context.autocast else x.dtype
    out = Tensor(f"{x.name}.rotated", x.shape, dtype, "qkv", x.formula)
    return tape.add(
        Op(f"{x.name}.rotary", "qkv", reads=(x.name,), makes=(out,), scratch=2 * out.bytes,
           backward_scratch=5 * out.bytes // 2)
    )  # fmt: skip


def _cast(tape: Tape, context: Context, x: Tensor) -> Tensor:
    """Autocast runs the core in the compute dtype."""
    if x.dtype == context.compute:
        return x
    copy = Tensor(f"{x.name}.cast", x.shape, context.compute, "qkv", "bf16 copy for autocast")
    return tape.add(Op(copy.name, "qkv", reads=(x.name,), makes=(copy,)))


def _mixed(context: Context) -> tuple[int, int, int]:
    """Shape of the core's output: (B, S, H·D), with the values' head size."""
    arch = context.arch
    return context.batch, context.seq, arch.heads * (arch.latent.value_dim if arch.latent else arch.head_dim)


def core_flops(context: Context) -> int:
    """QKᵀ and PV over the whole S×S square, 4·B·H·S²·D, as MFU counts them (a causal kernel skips half in time)."""
    return 4 * context.batch * context.arch.heads * context.seq**2 * context.arch.head_dim


def flash(tape: Tape, context: Context, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The fused kernel keeps q, k, v, its output and one fp32 log-sum-exp a row; scores are recomputed in backward
    (Dao et al. 2022, arXiv 2205.14135): backward is 2.5 times forward (Dao 2023, arXiv 2307.08691). The output lies
    in memory as (B, S, H, D), so the projection that follows reads it without a copy."""
    arch = context.arch
    q, k, v = (_cast(tape, context, x) for x in (q, k, v))
    out = Tensor("attention.mixed", _mixed(context), context.compute, CORE, "B·S·H·D")
    lse = Tensor("attention.lse", (context.batch, arch.heads, context.seq), "fp32", CORE, "B·H·S", differentiable=False)
    flops = core_flops(context)
    op = Op(
        "attention.flash", CORE, reads=(q.name, k.name, v.name), makes=(out, lse),
        saves=(q.name, k.name, v.name, out.name, lse.name), flops=flops, backward_flops=flops * 5 // 2,
        product=True, causal=True,
    )  # fmt: skip
    return tape.add(op)


def standard(tape: Tape, context: Context, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores, softmax and (with dropout) its mask and product, each (B, H, S, S); one (G·S, S) causal bias, G = H/K.

    The matrix products want whole heads one after the other: q, k and v are copied where a view cannot give that.
    """
    arch = context.arch
    groups = arch.heads // arch.kv_heads
    square = (context.batch, arch.heads, context.seq, context.seq)
    single = context.batch == 1 or arch.kv_heads == 1 or context.seq == 1
    held: list[Tensor] = [q, k, v]

    def scores(name: str, dtype: str, *, differentiable: bool = True, group: str = CORE) -> Tensor:
        return Tensor(f"attention.{name}", square, dtype, group, "B·H·S²", differentiable)

    def by_head(x: Tensor, view: bool) -> Tensor:
        x = _cast(tape, context, x)
        held.append(x)
        if view:
            return x
        copy = Tensor(f"{x.name}.by_head", x.shape, x.dtype, "qkv", x.formula)
        held.append(copy)
        return tape.add(Op(copy.name, "qkv", reads=(x.name,), makes=(copy,)))

    def hold() -> None:
        tape.hold(*held)

    rows, keys = by_head(q, single and groups == 1), by_head(k, single)
    flops = core_flops(context) // 2
    bias = Tensor("attention.bias", (groups * context.seq, context.seq), context.compute, CORE, "G·S²",
                  differentiable=False)  # fmt: skip
    tape.add(Op("attention.bias", CORE, reads=(), makes=(bias,), scratch=0 if groups == 1 else bias.bytes // groups))
    raw = tape.add(
        Op("attention.scores", CORE, reads=(rows.name, keys.name, bias.name),
           makes=(scores("scores", context.compute),), saves=(rows.name, keys.name), flops=flops,
           backward_flops=2 * flops, product=True)
    )  # fmt: skip
    weights = scores("softmax", context.compute)
    weights = tape.add(Op("attention.softmax", CORE, reads=(raw.name,), makes=(weights,), saves=(weights.name,)))
    if context.dropout:
        mask = scores("dropout_mask", "bool", differentiable=False, group="dropout")
        dropped = scores("dropped", context.compute, group="dropout")
        weights = tape.add(
            Op("attention.dropout", "dropout", reads=(weights.name,), makes=(dropped, mask), saves=(mask.name,),
               backward_scratch=0 if context.cuda else 2 * dropped.bytes)
        )  # fmt: skip
    values = by_head(v, single)
    out = Tensor("attention.product", _mixed(context), context.compute, CORE, "B·S·H·D")
    mixed = tape.add(
        Op("attention.product", CORE, reads=(weights.name, values.name), makes=(out,),
           saves=(weights.name, values.name), flops=flops, backward_flops=2 * flops, product=True)
    )  # fmt: skip
    hold()
    if arch.heads == 1 or context.seq == 1:
        return mixed
    tape.hold(weights)
    flat = Tensor("attention.mixed", _mixed(context), context.compute, "attention-out", "B·S·H·D")
    tape.add(Op("attention.flatten", "attention-out", reads=(mixed.name,), makes=(flat,)))
    return flat


Kernel = Callable[[Tape, "Context", Tensor, Tensor, Tensor], Tensor]

KERNELS: dict[str, Kernel] = {"flash": flash, "standard": standard, "tiled": flash, "triton": flash}

LARGEST_FLASH_HEAD = 256
"""What CUDA's FlashAttention takes."""


def kernel_name(context: Context) -> str:
    """The kernel that really runs: where the one asked for cannot, the scores are materialised
    (`engine.attention.select_kernel`). Ours have no dropout, nor has SDPA's on the CPU."""
    fused_on_cuda = context.cuda and context.attention == "flash"
    if context.dropout and not fused_on_cuda:
        return "standard"
    limited = fused_on_cuda or context.attention == "triton"
    return "standard" if limited and context.arch.head_dim > LARGEST_FLASH_HEAD else context.attention
