"""The decoder: exact shapes and counts, sane loss, and the RMSNorm that saves what CUDA's does."""

import math

import pytest
import torch
from torch import nn

from engine.attention import select_kernel
from engine.models.decoder import Decoder, initialise
from engine.models.norms import rms_norm
from engine.spec import RunSpec
from engine.training import build

CPU = torch.device("cpu")
MODELS = ["gpt-tiny", "llama-tiny", "gpt:2,48,3,100", "llama:2,48,6,2,80,100"]


def spec_of(model: str, **fields: object) -> RunSpec:
    return RunSpec.model_validate({"model": model, "seq": 16, "precision": "fp32", "device": "cpu", **fields})


@pytest.mark.parametrize("model", MODELS)
def test_parameter_count_is_the_architectures(model: str) -> None:
    spec = spec_of(model)
    counted = sum(parameter.numel() for parameter in build(spec, CPU).model.parameters())
    assert counted == spec.architecture.parameters


@pytest.mark.parametrize("model", MODELS)
def test_the_first_loss_is_that_of_a_uniform_guess(model: str) -> None:
    spec = spec_of(model)
    assert float(build(spec, CPU).step(0)) == pytest.approx(math.log(spec.architecture.vocab), rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed", "bf16-12", "bf16-autocast"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-8bit", "sgd"])
def test_every_recipe_learns_one_batch_by_heart(
    precision: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.optimizers.LEARNING_RATE", 3e-3 if optimizer != "sgd" else 0.1)
    training = build(spec_of("llama:2,32,2,1,64,64", precision=precision, optimizer=optimizer), CPU)
    first = float(training.step(0))
    for _ in range(20):
        last = float(training.step(0))
    assert last < first - 0.05


def test_values_depend_on_seed_and_name_alone() -> None:
    spec = spec_of("gpt:2,48,3,100")
    kernel = select_kernel("flash", device=CPU, dtype=torch.float32, head_dim=16, dropout=0.0)
    models = [Decoder(spec.architecture, kernel, positions=16) for _ in range(2)]
    for model in models:
        torch.manual_seed(id(model))
        initialise(model, seed=3)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_catalog_model_keeps_its_position_limit() -> None:
    with pytest.raises(ValueError, match="1024 learned positions"):
        _ = spec_of("gpt2", seq=2048).architecture


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_agrees_with_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 24), torch.randn(24)
    grad = torch.randn(3, 5, 24)
    reference = _norm_and_gradients(nn.functional.rms_norm, x.double(), weight.double(), grad.double())
    ours = _norm_and_gradients(lambda a, _, w, e: rms_norm(a, w, e), x.to(dtype), weight.to(dtype), grad.to(dtype))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for a, b in zip(reference, ours, strict=True):
        assert (a - b.double()).norm() / a.norm() < tolerance


def _norm_and_gradients(norm, x, weight, grad):  # type: ignore[no-untyped-def]
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = norm(x, weight.shape, weight, 1e-5)
    y.backward(grad)
    return y.detach(), x.grad, weight.grad
