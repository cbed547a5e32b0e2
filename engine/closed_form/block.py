"""The tapes of one decoder block, of the embedding and of the final norm: what `engine.models.decoder` runs.

Notation of the formulas: B sequences, S tokens, d hidden, H heads, K kv heads, D head size, f FFN width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from engine.architecture import Architecture
from engine.closed_form.attention import attention_core
from engine.closed_form.tape import OUTSIDE, Op, Tape, Tensor
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


def norm(tape: Tape, context: Context, x: Tensor, name: str, group: str) -> Tensor:
    """LayerNorm saves its input, mean and reciprocal deviation; RMSNorm its input and reciprocal root mean square."""
    arch, size = context.arch, DTYPE_BYTES[context.weight]
    statistic = "fp32" if context.cuda or arch.norm == "rmsnorm" else context.weight
    names = ("mean", "rstd") if arch.norm == "layernorm" else ("rrms",)
    statistics = [
        Tensor(f"{name}.{s}", (context.batch, context.seq, 1), statistic, group, "B·S", differentiable=False)
        for s in names
    ]
    out = context.stream(name, group)
    fp32_copy = 4 * out.elements
    plain_rms = arch.norm == "rmsnorm" and not context.cuda
    scratch = fp32_copy if plain_rms and size < 4 else 0
    op = Op(
        f"{name}", group, reads=(x.name,), makes=(out, *statistics), saves=(x.name, *(s.name for s in statistics)),
        weights=((f"{name}.weight", arch.norm_parameters * size),), scratch=scratch,
        backward_scratch=2 * fp32_copy if plain_rms else 0,
    )  # fmt: skip
    return tape.add(op)


def linear(
    tape: Tape, context: Context, x: Tensor, name: str, width: int, group: str, *, bias: bool, formula: str
) -> Tensor:
    """A projection of x (B, S, w) to `width` columns. It saves its input; autocast makes bf16 copies of the input and
    of the weight first, and saves those."""
    inner = x.shape[-1]
    saves = [x.name]
    weight_bytes = inner * width * DTYPE_BYTES[context.weight]
    gradients = [(f"{name}.weight", weight_bytes)]
    if bias:
        gradients.append((f"{name}.bias", width * DTYPE_BYTES[context.weight]))
    extra: tuple[Tensor, ...] = ()
    if context.autocast:
        if x.dtype != context.compute:
            copy = Tensor(f"{name}.input", x.shape, context.compute, group, "bf16 copy for autocast")
            x = tape.add(Op(f"{name}.cast", group, reads=(x.name,), makes=(copy,)))
        extra = (
            Tensor(f"{name}.weight_bf16", (width, inner), context.compute, group, "bf16 copy of the weight",
                   differentiable=False),
        )  # fmt: skip
        saves = [x.name, *(tensor.name for tensor in extra)]
    out = Tensor(name, (context.batch, context.seq, width), context.compute, group, formula)
    flops = 2 * context.rows * inner * width
    op = Op(
        name, group, reads=(x.name,), makes=(out, *extra), saves=tuple(saves), weights=tuple(gradients),
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


def add(tape: Tape, context: Context, x: Tensor, branch: Tensor, name: str) -> Tensor:
    """The residual addition; it saves nothing and belongs to the group of the branch that ends in it."""
    group = branch.group if branch.group != "dropout" else tape.tensors[branch.name].group
    return tape.add(Op(name, group, reads=(x.name, branch.name), makes=(context.stream(name, group),), passes=True))


def attention(tape: Tape, context: Context, x: Tensor) -> Tensor:
    arch = context.arch
    q = linear(tape, context, x, "q", arch.query_width, "qkv", bias=arch.qkv_bias, formula="B·S·H·D")
    k = linear(tape, context, x, "k", arch.kv_width, "qkv", bias=arch.qkv_bias, formula="B·S·K·D")
    v = linear(tape, context, x, "v", arch.kv_width, "qkv", bias=arch.qkv_bias, formula="B·S·K·D")
    mixed = attention_core(tape, context, q, k, v)
    out = linear(
        tape, context, mixed, "attention.out", arch.hidden, "attention-out", bias=arch.output_bias, formula="B·S·d"
    )
    tape.hold(x, mixed)
    return out


def mlp(tape: Tape, context: Context, x: Tensor) -> Tensor:
    arch = context.arch
    shape = (context.batch, context.seq, arch.ffn)

    def activate(source: Tensor) -> Tensor:
        out = Tensor("mlp.activated", shape, source.dtype, "mlp-activation", "B·S·f")
        saved = out if arch.activation == "relu" else source
        return tape.add(Op("mlp.activation", "mlp-activation", reads=(source.name,), makes=(out,), saves=(saved.name,)))

    def project(name: str) -> Tensor:
        return linear(tape, context, x, name, arch.ffn, "mlp-in", bias=arch.mlp_bias, formula="B·S·f")

    if arch.gated:
        activated = activate(project("mlp.gate"))
        up = project("mlp.up")
        product = Tensor("mlp.product", shape, up.dtype, "mlp-activation", "B·S·f")
        inner = tape.add(
            Op("mlp.gate_product", "mlp-activation", reads=(activated.name, up.name), makes=(product,),
               saves=(activated.name, up.name))
        )  # fmt: skip
    else:
        inner = activate(project("mlp.up"))
    out = linear(tape, context, inner, "mlp.down", arch.hidden, "mlp-out", bias=arch.mlp_bias, formula="B·S·d")
    tape.hold(x, inner)
    return out


@cache
def block_tape(context: Context) -> Tape:
    """x + attention(norm(x)), then x + mlp(norm(x)). Its one input is `x` (B, S, d)."""
    tape = Tape()
    x = tape.input(context.stream("x", "norms"))
    branch = attention(tape, context, norm(tape, context, x, "attention_norm", "norms"))
    middle = add(tape, context, x, dropout(tape, context, branch, "attention.out_dropped"), "x_middle")
    branch = mlp(tape, context, norm(tape, context, middle, "mlp_norm", "norms"))
    out = add(tape, context, middle, dropout(tape, context, branch, "mlp.out_dropped"), "x_out")
    tape.hold(middle)
    assert out.shape == x.shape
    return tape


@cache
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
