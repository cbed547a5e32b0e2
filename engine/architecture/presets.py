"""Model names to architectures: presets, made-up shapes, configs. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from engine.architecture.huggingface import from_config
from engine.architecture.shapes import LARGEST_SHAPE, Architecture
from engine.catalog import model_configs
from engine.errors import SpecError

DEFAULT_VOCAB = 8192

# (layers, hidden, heads, kv_heads, ffn, vocab, max_positions): shapes that no config file in the catalog holds.
_LLAMA_SHAPES: dict[str, tuple[int, int, int, int, int, int, int]] = {
    "llama-tiny": (4, 256, 8, 4, 688, DEFAULT_VOCAB, 0),
    "llama-7b": (32, 4096, 32, 32, 11008, 32000, 2048),  # Touvron et al. 2023, arXiv 2302.13971, table 2
    "llama-13b": (40, 5120, 40, 40, 13824, 32000, 2048),
    "llama-2-13b": (40, 5120, 40, 40, 13824, 32000, 4096),  # Touvron et al. 2023, arXiv 2307.09288
    "llama-2-70b": (80, 8192, 64, 8, 28672, 32000, 4096),
}
_GPT_SHAPES: dict[str, tuple[int, int, int, int]] = {"gpt-tiny": (4, 256, 4, DEFAULT_VOCAB)}


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


@lru_cache(1024)
def _preset(name: str) -> Architecture:
    if name in _GPT_SHAPES:
        return _gpt(name, *_GPT_SHAPES[name])
    if name in _LLAMA_SHAPES:
        return _llama(name, *_LLAMA_SHAPES[name])
    if name in model_configs():
        return from_config(model_configs()[name], name)
    if name.startswith(("gpt:", "llama:")):
        return _made_up(name)
    near = get_close_matches(name[:80].lower(), presets())
    hint = f": did you mean {', '.join(near)}?" if near else "."
    raise SpecError(
        "model",
        f"unknown model {name[:80]!r}{hint} Accepted are gpt:L,d,a[,V], llama:L,d,a,kv,f[,V], a Hugging Face "
        f"config.json and the presets {', '.join(presets())}",
    )


def resolve_model(model: str | Mapping[str, Any]) -> Architecture:
    """The architecture of a spec's `model`. Raises SpecError naming the field at fault."""
    if isinstance(model, str):
        return _preset(model)
    return replace(_from_config_text(json.dumps(model, sort_keys=True)), from_user=True)


@lru_cache(1024)
def _from_config_text(text: str) -> Architecture:
    return from_config(json.loads(text), "config.json")
