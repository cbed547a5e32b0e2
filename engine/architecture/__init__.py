"""A model's shapes and exact parameter count, from a preset, a made-up shape or a Hugging Face config. Torch-free."""

from engine.architecture.huggingface import from_config
from engine.architecture.parameters import Parameter, parameter_table
from engine.architecture.presets import DEFAULT_VOCAB, presets, resolve_model
from engine.architecture.shapes import LARGEST_SHAPE, MAX_DIMENSION, Architecture

__all__ = [
    "DEFAULT_VOCAB",
    "LARGEST_SHAPE",
    "MAX_DIMENSION",
    "Architecture",
    "Parameter",
    "from_config",
    "parameter_table",
    "presets",
    "resolve_model",
]
