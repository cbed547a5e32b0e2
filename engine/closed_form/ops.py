"""The ops that blocks are made of, as rows of a tape; and what a tape needs to know of a spec.

Notation of the formulas: B sequences, S tokens, d hidden, H heads, K kv heads, D head size, f FFN width, V vocabulary,
E experts, k experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.architecture import Architecture
from engine.closed_form.tape import Op, Tape, Tensor
from engine.recipes import DTYPE_BYTES, RECIPES
from engine.spec import RunSpec


@dataclass(frozen=True)
class Context:
    """What a tape needs to know of a spec."""

    arch: Architecture
    batch: int
    seq: int
    weight: str
    """Dtype of weights, norms and of the residual stream."""
    compute: str
    """Dtype of matmul results."""
    attention: str
    dropout: bool
    cuda: bool
    """Figures are for a CUDA device: its kernels differ in scratch and in a few small tensors."""

    @property
    def rows(self) -> int:
        return self.batch * self.seq

    @property
    def autocast(self) -> bool:
        return self.weight != self.compute

    def stream(self, name: str, group: str) -> Tensor:
        """A (B, S, d) tensor of the residual stream."""
        return Tensor(name, (self.batch, self.seq, self.arch.hidden), self.weight, group, "B·S·d")


def predicts_cuda(spec: RunSpec) -> bool:
    """Whether the figures are for a CUDA device: a GPU is named, or the run would be on one."""
    return spec.gpu is not None or spec.device.startswith("cuda")


def context_of(spec: RunSpec) -> Context:
    recipe = RECIPES[spec.precision]
    return Context(
        arch=spec.architecture,
        batch=spec.micro_batch,
        seq=spec.seq,
        weight=recipe.weight,
        compute=recipe.compute,
        attention=spec.attention,
        dropout=spec.dropout > 0,
        cuda=predicts_cuda(spec),
    )


def norm(
    tape: Tape, context: Context, x: Tensor, name: str, group: str, *, per_row: int = 1, parameters: int | None = None
) -> Tensor:
    """LayerNorm saves its input, mean and reciprocal deviation; RMSNorm its input and reciprocal root mean square.

    `per_row` norms share a row (one a head); `parameters` is how many elements its weight (and bias) have.
    """
    arch, size = context.arch, DTYPE_BYTES[context.weight]
    statistic = "fp32" if context.cuda or arch.norm == "rmsnorm" else x.dtype
    names = ("mean", "rstd") if arch.norm == "layernorm" else ("rrms",)
    statistics = [
        Tensor(f"{name}.{s}", (*x.shape[:-1], per_row), statistic, group, "B·S", differentiable=False) for s in names
    ]
    out = Tensor(name, x.shape, x.dtype, group, x.formula)
    fp32_copy = 4 * out.elements
    plain_rms = arch.norm == "rmsnorm" and not context.cuda
    elements = arch.norm_parameters if parameters is None else parameters
    op = Op(
        name, group, reads=(x.name,), makes=(out, *statistics), saves=(x.name, *(s.name for s in statistics)),
        weights=((f"{name}.weight", elements * size),), scratch=fp32_copy if plain_rms and x.dtype != "fp32" else 0,
        backward_scratch=2 * fp32_copy if plain_rms else 0,
    )  # fmt: skip
    return tape.add(op)


def linear(
    tape: Tape,
    context: Context,
    x: Tensor,
    name: str,
    width: int,
    group: str,
    *,
    bias: bool,
    formula: str,
    copies: int = 1,
) -> Tensor:
    """A projection of x (B, S, w) to `width` columns. It saves its input; autocast makes bf16 copies of the input and
    of the weight first, and saves those. `copies` experts share the rows between them."""
    inner = x.shape[-1]
    saves = [x.name]
    weight_bytes = copies * inner * width * DTYPE_BYTES[context.weight]
    gradients = [(f"{name}.weight", weight_bytes)]
    if bias:
        gradients.append((f"{name}.bias", copies * width * DTYPE_BYTES[context.weight]))
    if context.autocast:
        if x.dtype != context.compute:
            copy = Tensor(f"{name}.input", x.shape, context.compute, group, "bf16 copy for autocast")
            x = tape.add(Op(f"{name}.cast", group, reads=(x.name,), makes=(copy,)))
        cast = Tensor(
            f"{name}.weight_bf16", (copies, width, inner), context.compute, group, "bf16 copy of the weight",
            differentiable=False,
        )  # fmt: skip
        tape.add(Op(f"{name}.cast_weight", group, reads=(), makes=(cast,), weight_bytes=weight_bytes))
        saves = [x.name, cast.name]
    out = Tensor(name, (*x.shape[:-1], width), context.compute, group, formula)
    flops = 2 * x.elements * width
    op = Op(
        name, group, reads=(x.name,), makes=(out,), saves=tuple(saves), weights=tuple(gradients),
        flops=flops, backward_flops=2 * flops, product=True, weight_bytes=weight_bytes,
    )  # fmt: skip
    return tape.add(op)


def dropout(tape: Tape, context: Context, x: Tensor, name: str) -> Tensor:
    """Dropout keeps one byte of mask an element."""
    if not context.dropout:
        return x
    mask = Tensor(f"{name}.mask", x.shape, "bool", "dropout", "B·S·d", differentiable=False)
    out = Tensor(name, x.shape, x.dtype, "dropout", "B·S·d")
    scratch = 0 if context.cuda else 2 * out.bytes
    return tape.add(
        Op(name, "dropout", reads=(x.name,), makes=(out, mask), saves=(mask.name,), backward_scratch=scratch)
    )


def add(tape: Tape, context: Context, x: Tensor, branch: Tensor, name: str, group: str) -> Tensor:
    """The residual addition; it saves nothing and belongs to the group of the branch that ends in it."""
    return tape.add(Op(name, group, reads=(x.name, branch.name), makes=(context.stream(name, group),), passes=True))
