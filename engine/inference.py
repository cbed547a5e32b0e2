"""RunSpec with mode=inference -> prefill, in chunks or whole, and greedy decode with a KV cache.

It runs unchanged on real tensors (measurement) and on fake ones (simulation). Only the last position of a prompt
needs logits, so activations are those of one block over one chunk, O(B·chunk·d), and a chunk bounds them (SARATHI,
Agrawal et al. 2023, arXiv 2308.16369).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention import Kernel, select_kernel
from engine.models.decoder import Decoder, initialise_parameter
from engine.models.kv_cache import KvCache
from engine.offload.assembly import Offload, offloads
from engine.optimizers import DTYPES
from engine.recipes import RECIPES
from engine.spec import RunSpec
from engine.training import PhaseMarker, build_decoder, storage_bytes, unmarked


@dataclass
class Inference:
    """A built inference run. Its step is one request: a prompt in, `new_tokens` tokens out."""

    spec: RunSpec
    device: torch.device
    model: Decoder
    blocks: list[nn.Module]
    kernel: Kernel
    caches: list[KvCache]
    offload: Offload | None = None
    notes: list[str] = field(default_factory=list)

    @torch.no_grad()
    def step(self, index: int, marker: PhaseMarker = unmarked) -> Tensor:
        """Prefill the prompt of that index and generate greedily: token ids (B, new tokens).

        The first token comes from the prompt's last logits, so prefill is the time to it, also when none is asked for.
        """
        spec = self.spec
        tokens = self._prompt(index)
        for cache in self.caches:
            cache.length = 0
        with marker("prefill"):
            for start in range(0, spec.seq, spec.prefill_chunk or spec.seq):
                last = self._last_hidden(tokens[:, start : start + (spec.prefill_chunk or spec.seq)])
            generated = [self._most_likely(last)]
        with marker("decode"):
            for _ in range(spec.new_tokens - 1):
                generated.append(self._most_likely(self._last_hidden(generated[-1])))
        return torch.cat(generated, 1)[:, : spec.new_tokens]

    def _last_hidden(self, tokens: Tensor) -> Tensor:
        """Append tokens (B, n) to what was seen; the last one's final hidden state (B, 1, d), alone in memory."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=RECIPES[self.spec.precision].autocast):
            hidden: Tensor = self.model(tokens, start=self.caches[0].length, caches=self.caches)
        return hidden[:, -1:].clone()

    def _most_likely(self, hidden: Tensor) -> Tensor:
        """(B, 1, d) -> the token ids with the largest logit (B, 1)."""
        return F.linear(hidden, self.model.head_weight.to(hidden.dtype)).argmax(-1)

    def _prompt(self, number: int) -> Tensor:
        """Random tokens (B, S) from the seed and the prompt's number alone."""
        generator = torch.Generator(self.device).manual_seed(self.spec.seed * 1_000_003 + number)
        shape = (self.spec.micro_batch, self.spec.seq)
        return torch.randint(self.spec.architecture.vocab, shape, generator=generator, device=self.device)

    def resident(self) -> list[Tensor]:
        """What is on the device between requests."""
        return [*self.model.parameters(), *self.model.buffers(), *self.cache_tensors()]

    def cache_tensors(self) -> list[Tensor]:
        return [tensor for cache in self.caches for tensor in (cache.keys, cache.values)]

    def base_bytes(self) -> dict[str, int]:
        """Device bytes alive between requests, by category. The KV cache counts as activations."""
        return {
            "parameters": storage_bytes([*self.model.parameters(), *self.model.buffers()]),
            "activations": storage_bytes(self.cache_tensors()),
        }

    def prompt_cache_bytes(self) -> int:
        """Bytes of the cache that the prompt fills: 2·L·B·S·K·D·bytes. The rest is room for the new tokens."""
        return sum(cache.bytes_of(self.spec.seq) for cache in self.caches)

    def close(self) -> None:
        """Stop what runs beside the main thread and remove its files."""
        if self.offload:
            self.offload.close()


def build_inference(spec: RunSpec, device: torch.device) -> Inference:
    """Model, kernel and empty KV caches of an inference spec, initialised from its seed."""
    arch, dtype = spec.architecture, DTYPES[RECIPES[spec.precision].compute]
    kernel = select_kernel(spec.attention, device=device, dtype=dtype, head_dim=arch.head_dim, dropout=0.0)
    model = build_decoder(spec, device, kernel)
    blocks = list(model.blocks)
    fill = partial(initialise_parameter, layers=arch.layers, seed=spec.seed)
    offload = Offload(spec, device, model, blocks, fill) if offloads(spec) else None
    capacity = spec.seq + spec.new_tokens
    caches = [
        KvCache(spec.micro_batch, arch.kv_heads, capacity, arch.head_dim, dtype=dtype, device=device) for _ in blocks
    ]
    notes = [kernel.note, *(offload.warnings if offload else [])]
    return Inference(spec, device, model.eval(), blocks, kernel, caches, offload, [note for note in notes if note])
