"""One decoder-only transformer for GPT style (LayerNorm, learned positions, GELU, biases, tied head) and LLaMA style
(RMSNorm, rotary positions, SwiGLU, grouped-query attention). Pre-norm in both.

Shapes: B sequences, S tokens, d hidden, H heads, K kv heads, D head size, f FFN width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.architecture import Architecture
from engine.attention import Kernel
from engine.models.norms import rms_norm


class Linear(nn.Linear):
    """nn.Linear that leaves its values to `initialise`."""

    def reset_parameters(self) -> None:
        return


class Embedding(nn.Embedding):
    """nn.Embedding that leaves its values to `initialise`."""

    def reset_parameters(self) -> None:
        return


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm that leaves its values to `initialise`."""

    def reset_parameters(self) -> None:
        return


class RmsNorm(nn.Module):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon)


def make_norm(arch: Architecture) -> nn.Module:
    if arch.norm == "layernorm":
        return LayerNorm(arch.hidden, eps=arch.norm_epsilon)
    return RmsNorm(arch.hidden, arch.norm_epsilon)


class Dropout(nn.Module):
    """`torch.native_dropout`: the mask is one byte an element on every device (F.dropout's CPU mask is four)."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        if self.probability == 0.0 or not self.training:
            return x
        dropped: Tensor = torch.native_dropout(x, self.probability, True)[0]
        return dropped


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x (B, heads, S, D) by cos, sin (S, D) (Su et al. 2021, arXiv 2104.09864)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotary_tables(arch: Architecture, positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each (positions, D), in `dtype`."""
    frequency = arch.rope_theta ** (-torch.arange(0, arch.head_dim, 2, dtype=torch.float32) / arch.head_dim)
    angle = torch.outer(torch.arange(positions, dtype=torch.float32), frequency).repeat(1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


class Attention(nn.Module):
    """Causal self-attention; the kernel decides what is materialised."""

    def __init__(self, arch: Architecture, kernel: Kernel, dropout: float) -> None:
        super().__init__()
        self.head_dim, self.kernel, self.dropout = arch.head_dim, kernel, dropout
        self.q = Linear(arch.hidden, arch.query_width, bias=arch.qkv_bias)
        self.k = Linear(arch.hidden, arch.kv_width, bias=arch.qkv_bias)
        self.v = Linear(arch.hidden, arch.kv_width, bias=arch.qkv_bias)
        self.out = Linear(arch.query_width, arch.hidden, bias=arch.output_bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, cache: Any = None) -> Tensor:
        q, k, v = (self._heads(projection(x)) for projection in (self.q, self.k, self.v))
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        if cache is not None:
            k, v = cache.append(k, v)
        mixed = self.kernel(q, k, v, causal=True, dropout=self.dropout if self.training else 0.0)
        del q, k, v
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output

    def _heads(self, x: Tensor) -> Tensor:
        """(B, S, heads·D) -> (B, heads, S, D), a view."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


class Mlp(nn.Module):
    """GELU (plain) or SwiGLU (gated) feed-forward."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.activation = arch.activation
        self.up = Linear(arch.hidden, arch.ffn, bias=arch.mlp_bias)
        self.gate = Linear(arch.hidden, arch.ffn, bias=arch.mlp_bias) if arch.gated else None
        self.down = Linear(arch.ffn, arch.hidden, bias=arch.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = self._activate(self.up(x)) if self.gate is None else self._activate(self.gate(x)) * self.up(x)
        output: Tensor = self.down(inner)
        return output

    def _activate(self, x: Tensor) -> Tensor:
        match self.activation:
            case "silu":
                return F.silu(x)
            case "relu":
                return F.relu(x)
            case "gelu_tanh":
                return F.gelu(x, approximate="tanh")
            case "gelu":
                return F.gelu(x)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); dropout on both branches."""

    def __init__(self, arch: Architecture, kernel: Kernel, dropout: float) -> None:
        super().__init__()
        self.attention_norm = make_norm(arch)
        self.attention = Attention(arch, kernel, dropout)
        self.mlp_norm = make_norm(arch)
        self.mlp = Mlp(arch)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None, cache: Any = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rotary, cache))
        output: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return output


class Decoder(nn.Module):
    """tokens (B, S) -> final hidden states (B, S, d). `head_weight` (V, d) makes logits of them."""

    rotary_cos: Tensor
    rotary_sin: Tensor

    def __init__(self, arch: Architecture, kernel: Kernel, *, dropout: float = 0.0, positions: int = 0) -> None:
        """`positions` is how many rotary positions to tabulate; learned ones have arch.max_positions."""
        super().__init__()
        self.embedding = Embedding(arch.vocab, arch.hidden)
        self.positions = (
            Embedding(arch.max_positions or positions, arch.hidden) if arch.positions == "learned" else None
        )
        self.dropout = Dropout(dropout)
        self.blocks = nn.ModuleList(Block(arch, kernel, dropout) for _ in range(arch.layers))
        self.norm = make_norm(arch)
        self.head = None if arch.tied else Linear(arch.hidden, arch.vocab, bias=False)
        if arch.positions == "rope":
            cos, sin = rotary_tables(arch, positions, self.embedding.weight.dtype)
            self.register_buffer("rotary_cos", cos, persistent=False)
            self.register_buffer("rotary_sin", sin, persistent=False)
        self.uses_rotary = arch.positions == "rope"

    @property
    def head_weight(self) -> Tensor:
        module = self.embedding if self.head is None else self.head
        return module.weight

    def forward(self, tokens: Tensor, *, start: int = 0, caches: list[Any] | None = None) -> Tensor:
        """`start` is the position of the first token, `caches` one KV cache a block (inference)."""
        stop = start + tokens.shape[1]
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[start:stop]
        x = self.dropout(x)
        rotary = (self.rotary_cos[start:stop], self.rotary_sin[start:stop]) if self.uses_rotary else None
        for index, block in enumerate(self.blocks):
            x = block(x, rotary, caches[index]) if caches else block(x, rotary)
        hidden: Tensor = self.norm(x)
        return hidden


@torch.no_grad()
def initialise_parameter(name: str, parameter: Tensor, layers: int, seed: int) -> None:
    """Fill one parameter in place from (seed, name) alone, so that any subset can be made at any time.

    GPT-2's scheme: N(0, 0.02), output projections scaled by 1/√(2L), norms 1, biases 0.
    """
    if "norm" in name:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    elif name.endswith("bias"):
        parameter.zero_()
    else:
        residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
        deviation = 0.02 / math.sqrt(2 * layers) if residual else 0.02
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest, "big") >> 1)
        parameter.normal_(0.0, deviation, generator=generator)


def initialise(model: Decoder, seed: int) -> None:
    """Fill every parameter of a freshly built decoder that has memory (an offloaded block's gets its own later)."""
    for name, parameter in model.named_parameters():
        if parameter.untyped_storage().nbytes():
            initialise_parameter(name, parameter, len(model.blocks), seed)
