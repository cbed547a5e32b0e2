"""A program: relative errors of the Triton kernels against float64, as JSON. On a CPU it needs TRITON_INTERPRET=1."""

from __future__ import annotations

import json
import math
import sys

import torch

from engine.attention.kernel import Kernel
from engine.attention.triton_attention import triton_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# batch, heads, key heads, queries, keys, head size, causal
SHAPES = [
    (1, 2, 2, 1, 1, 32, True),
    (2, 4, 2, 7, 7, 32, True),
    (1, 4, 1, 3, 70, 48, True),
    (1, 2, 2, 67, 67, 64, False),
    (1, 2, 1, 130, 150, 32, True),
    (1, 2, 1, 65, 65, 128, True),
    (1, 1, 1, 33, 33, 256, True),
]


def errors(shape: tuple[int, int, int, int, int, int, bool], dtype: torch.dtype) -> list[float]:
    """Of the output and the gradients of q, k, v."""
    batch, heads, kv_heads, queries, keys, width, causal = shape
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries))
    q, k, v, upstream = (
        torch.randn(batch, rows, n, width, generator=generator).to(DEVICE, dtype).transpose(1, 2) for n, rows in sizes
    )
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    repeated = [x.repeat_interleave(heads // kv_heads, 1) for x in exact[1:]]
    scores = exact[0] @ repeated[0].mT / math.sqrt(width)
    if causal:
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=DEVICE).triu(keys - queries + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    expected = scores.softmax(-1) @ repeated[1]
    references = (expected, *torch.autograd.grad(expected, exact, upstream.double()))

    inputs = [x.requires_grad_() for x in (q, k, v)]
    output = Kernel("triton", triton_attention)(*inputs, causal=causal)
    values = (output, *torch.autograd.grad(output, inputs, upstream))
    scale = 0.1 * max(float(x.detach().norm()) for x in references)  # what is 0 exactly has no relative error
    return [
        float((a.detach().double() - b.detach()).norm()) / max(float(b.detach().norm()), scale)
        for a, b in zip(values, references, strict=True)
    ]


if __name__ == "__main__":
    dtype = getattr(torch, sys.argv[1])
    print(json.dumps({str(shape): errors(shape, dtype) for shape in SHAPES}))
