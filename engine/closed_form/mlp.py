"""The tape of a feed-forward branch: dense, or a mixture of experts."""

from __future__ import annotations

from engine.closed_form.ops import Context, linear
from engine.closed_form.tape import Op, Tape, Tensor


def mlp(tape: Tape, context: Context, x: Tensor) -> Tensor:
    """The branch that most blocks of the model have."""
    arch = context.arch
    if arch.experts and arch.dense_layers < arch.layers:
        return mixture(tape, context, x)
    return dense(tape, context, x, "mlp", arch.ffn, bias=arch.mlp_bias)


def dense(
    tape: Tape, context: Context, x: Tensor, name: str, width: int, *, bias: bool, copies: int = 1, rows: str = "B·S"
) -> Tensor:
    """up (and gate), activation, down: x (B, S, d) -> (B, S, d). `copies` experts share the rows between them."""
    arch = context.arch
    shape = (*x.shape[:-1], width)

    def activate(source: Tensor) -> Tensor:
        out = Tensor(f"{name}.activated", shape, source.dtype, "mlp-activation", f"{rows}·f")
        saved = out if arch.activation == "relu" else source
        return tape.add(
            Op(f"{name}.activation", "mlp-activation", reads=(source.name,), makes=(out,), saves=(saved.name,))
        )

    def project(which: str) -> Tensor:
        return linear(
            tape, context, x, f"{name}.{which}", width, "mlp-in", bias=bias, formula=f"{rows}·f", copies=copies
        )

    if arch.gated:
        activated = activate(project("gate"))
        up = project("up")
        product = Tensor(f"{name}.product", shape, up.dtype, "mlp-activation", f"{rows}·f")
        inner = tape.add(
            Op(f"{name}.gate_product", "mlp-activation", reads=(activated.name, up.name), makes=(product,),
               saves=(activated.name, up.name))
        )  # fmt: skip
    else:
        inner = activate(project("up"))
    out = linear(
        tape, context, inner, f"{name}.down", arch.hidden, "mlp-out", bias=bias, formula=f"{rows}·d", copies=copies
    )
    tape.hold(x, inner)
    return out


def mixture(tape: Tape, context: Context, x: Tensor) -> Tensor:
    """Router, k copies of each token through balanced experts, the weighted sum, and what every token shares.

    Kept beside the experts' own tensors: the router's probabilities, the gathered tokens, and the experts' outputs
    (for the gradient of the router's weights).
    """
    arch, chosen = context.arch, context.arch.experts_per_token
    scores = linear(tape, context, x, "router", arch.experts, "mlp-in", bias=arch.expert_bias, formula="B·S·E")
    weights = Tensor("router.weights", scores.shape, "fp32", "mlp-in", "B·S·E")
    weights = tape.add(Op("router.softmax", "mlp-in", reads=(scores.name,), makes=(weights,), saves=(weights.name,)))
    rows = (context.batch, context.seq * chosen, arch.hidden)
    gathered = Tensor("expert.input", rows, x.dtype, "mlp-in", "B·S·k·d")
    gathered = tape.add(Op("expert.gather", "mlp-in", reads=(x.name,), makes=(gathered,)))
    out = dense(
        tape, context, gathered, "expert", arch.expert_ffn, bias=arch.expert_bias, copies=arch.experts, rows="B·S·k"
    )
    combined = context.stream("expert.combined", "mlp-out")
    combined = tape.add(
        Op("expert.combine", "mlp-out", reads=(out.name, weights.name), makes=(combined,),
           saves=(out.name, weights.name), scratch=out.bytes)
    )  # fmt: skip
    if not arch.shared_ffn:
        return combined
    shared = dense(tape, context, x, "shared", arch.shared_ffn, bias=False)
    total = context.stream("expert.total", "mlp-out")
    return tape.add(Op("shared.add", "mlp-out", reads=(combined.name, shared.name), makes=(total,), passes=True))
