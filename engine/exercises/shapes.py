"""The model inputs that several exercises share, and the RunSpec `model` they make."""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import SpecError
from engine.exercises.exercise import Input, Inputs, Value

BOUNDS: dict[str, Input] = {
    "layers": Input("layers", "Layers", 40, "", "L", 1, 256),
    "hidden": Input("hidden", "Hidden size", 5120, "", "d", 8, 65_536),
    "heads": Input("heads", "Attention heads", 40, "", "H", 1, 1024),
    "kv_heads": Input("kv_heads", "Key/value heads", 40, "", "K", 1, 1024),
    "ffn": Input("ffn", "FFN width", 13_824, "", "f", 8, 262_144),
    "vocab": Input("vocab", "Vocabulary", 32_000, "", "V", 2, 1_000_000),
    "batch": Input("batch", "Micro-batch", 4, "", "B", 1, 4096),
    "seq": Input("seq", "Sequence length", 4096, "", "S", 1, 1_048_576),
}


def shape_inputs(**defaults: int) -> tuple[Input, ...]:
    """The named inputs with an exercise's own defaults."""
    shared = (BOUNDS[name] for name in defaults)
    return tuple(
        Input(each.name, each.label, defaults[each.name], each.help, each.symbol, each.minimum, each.maximum)
        for each in shared
    )


def _check_heads(inputs: Inputs, *, even: bool) -> None:
    hidden, heads = inputs["hidden"], inputs["heads"]
    if hidden % heads or (even and hidden // heads % 2):
        rule = "an even number of columns each" if even else "equal heads"
        raise SpecError("heads", f"{heads} heads do not divide the hidden size {hidden} into {rule}")


def llama_model(inputs: Inputs) -> str:
    """`llama:L,d,a,kv,f,V`. Raises SpecError where the heads do not divide."""
    _check_heads(inputs, even=True)
    if inputs["heads"] % inputs["kv_heads"]:
        raise SpecError("kv_heads", f"{inputs['kv_heads']} key/value heads do not divide {inputs['heads']} heads")
    return "llama:" + ",".join(str(inputs[name]) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"))


def gpt_model(inputs: Mapping[str, Value], vocab: int | None = None) -> str:
    """`gpt:L,d,a,V`. Raises SpecError where the heads do not divide."""
    _check_heads(inputs, even=False)
    columns = inputs["vocab"] if vocab is None else vocab
    return f"gpt:{inputs['layers']},{inputs['hidden']},{inputs['heads']},{columns}"
