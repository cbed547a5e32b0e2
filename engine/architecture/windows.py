"""Which layers attend through a sliding window: as each family's transformers config works it out. Torch-free."""

from __future__ import annotations

from typing import Any

from engine.architecture.reader import Reader

FULL_EVERY = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6}
"""By model_type: every how-manieth layer attends to everything, where `layer_types` does not say. Others slide in all
layers, Qwen's from `max_window_layers` on."""

QWEN_FULL_LAYERS = 28  # max_window_layers, where a config leaves it out


def sliding_window(reader: Reader, kind: str, layers: int) -> dict[str, Any]:
    """Fields of the architecture: the window in tokens and how many layers have it; none without a window.

    Raises SpecError for a field of the wrong kind, whether or not there is a window.
    """
    window = reader.size("sliding_window", default=0)
    qwen = kind.startswith("qwen")
    count = _sliding_layers(reader, kind, layers, qwen)
    if not reader.flag("use_sliding_window", not qwen) or not window or not count:
        return {}
    return {"sliding_window": window, "sliding_layers": count}


def _sliding_layers(reader: Reader, kind: str, layers: int, qwen: bool) -> int:
    types = reader.layer_types(layers)
    if types:
        return types.count("sliding_attention")
    if qwen:
        return max(0, layers - reader.size("max_window_layers", default=QWEN_FULL_LAYERS, least=0))
    if kind not in FULL_EVERY:
        return layers
    named = ("sliding_window_pattern", "_sliding_window_pattern") if kind == "gemma3_text" else ()
    full_every = reader.size(*named, default=FULL_EVERY[kind]) if named else FULL_EVERY[kind]
    return layers - layers // full_every
