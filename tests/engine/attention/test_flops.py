from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from engine.attention import select_kernel
from engine.spec import Attention

CPU = torch.device("cpu")
PRODUCT = 2 * 2 * 4 * 32 * 32 * 8  # 2·B·H·S²·D


def projections() -> list[torch.Tensor]:
    return [torch.randn(2, heads, 32, 8, requires_grad=True) for heads in (4, 2, 2)]


@pytest.mark.parametrize(("name", "backward"), [("standard", 4), ("flash", 5), ("tiled", 5)])
def test_forward_is_two_products_and_flash_backward_five(name: Attention, backward: int) -> None:
    kernel = select_kernel(name, device=CPU, dtype=torch.float32, head_dim=8, dropout=0.0)
    with FlopCounterMode(display=False) as forward:
        output = kernel(*projections())
    with FlopCounterMode(display=False) as back:
        output.sum().backward()
    assert forward.get_total_flops() == 2 * PRODUCT
    assert back.get_total_flops() == backward * PRODUCT


@pytest.mark.parametrize(("keep", "products"), [(False, 2 + 5), (True, 5)])
def test_a_selective_policy_sees_tiled_as_one_operator(keep: bool, products: int) -> None:
    """Saved, it is not run again in backward; not saved, it costs one more forward."""
    kernel = select_kernel("tiled", device=CPU, dtype=torch.float32, head_dim=8, dropout=0.0)
    q, k, v = projections()

    def policy(_context: object, operator: object, *_: object, **__: object) -> CheckpointPolicy:
        chosen = keep and operator == torch.ops.remat.tiled_attention.default
        return CheckpointPolicy.MUST_SAVE if chosen else CheckpointPolicy.PREFER_RECOMPUTE

    output = checkpoint(
        lambda *x: kernel(*x).sin(), q, k, v, use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )  # fmt: skip
    with FlopCounterMode(display=False) as back:
        gradients = torch.autograd.grad(output.sum(), (q, k, v))
    assert back.get_total_flops() == products * PRODUCT
    for value, expected in zip(gradients, torch.autograd.grad(kernel(q, k, v).sin().sum(), (q, k, v)), strict=True):
        assert torch.equal(value, expected)
