"""Whatever is offloaded, five steps give the same losses and the same weights, bit for bit."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.spec import RunSpec
from engine.training import build

CPU = torch.device("cpu")
PLACES = [  # optimizer, parameters, activations
    ("cpu", "none", "none"),
    ("nvme", "none", "none"),
    ("none", "none", "cpu"),
    ("cpu", "cpu", "cpu"),
    ("nvme", "nvme", "cpu"),
    ("nvme", "cpu", "none"),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Several threads spin for each other's next tiny operator when cores are scarce."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nvme_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("REMAT_NVME_DIR", str(tmp_path))
    return tmp_path


def train(steps: int = 5, **fields: Any) -> tuple[list[float], dict[str, Tensor]]:
    training = build(RunSpec(**{"model": "gpt:3,32,4,128", "seq": 32, "precision": "fp32", **fields}), CPU)
    try:
        offload = training.offload
        if offload and offload.activations:
            offload.activations.min_bytes = 512  # everything that a block saves
        losses = [float(training.step(index)) for index in range(steps)]
        if offload and offload.activations:
            assert offload.moved_bytes()["down"] > 0
        if offload and offload.parameters:
            for unit in offload.parameters.units:
                assert all(parameter.untyped_storage().nbytes() == 0 for parameter in unit.parameters)
                offload.parameters.allocate(unit)
                for copy in offload.parameters.weights.fetch(unit):
                    copy.wait()
        return losses, {name: weight.detach().clone() for name, weight in training.model.named_parameters()}
    finally:
        training.close()


def assert_same(fields: dict[str, Any], offloads: list[dict[str, Any]]) -> None:
    losses, weights = train(**fields)
    for offload in offloads:
        other_losses, other_weights = train(**fields, **offload)
        assert other_losses == losses, offload
        for name, weight in weights.items():
            assert torch.equal(other_weights[name], weight), (offload, name)


def offload_fields(optimizer: str, parameters: str, activations: str, overlap: bool = True) -> dict[str, Any]:
    return {
        "offload_optimizer": optimizer,
        "offload_parameters": parameters,
        "offload_activations": activations,
        "offload_overlap": overlap,
    }


@pytest.mark.parametrize("checkpointing", ["none", "per-layer", "selective", "every-2"])
def test_every_option_with_every_kind_of_policy(checkpointing):
    both = itertools.product(PLACES, (True, False))
    assert_same({"checkpointing": checkpointing}, [offload_fields(*places, overlap) for places, overlap in both])


@pytest.mark.parametrize("model", ["gpt:3,32,4,128", "llama:3,32,4,2,96,128"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16", "bf16-12"])
def test_every_recipe_while_gradients_accumulate(model, precision):
    fields = {"model": model, "precision": precision, "grad_accumulation": 3}
    assert_same(fields, [offload_fields(*PLACES[0]), offload_fields(*PLACES[4])])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw-8bit"])
def test_every_optimizer(optimizer):
    assert_same({"optimizer": optimizer}, [offload_fields(*PLACES[0]), offload_fields(*PLACES[4])])


def test_dropout_draws_the_same_masks():
    fields = {"dropout": 0.1, "checkpointing": "per-layer"}
    assert_same(fields, [offload_fields(*PLACES[3]), offload_fields(*PLACES[4])])


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("fields", [{}, {"grad_accumulation": 3}, {"optimizer": "sgd"}, {"precision": "bf16-mixed"}])
def test_clipped_gradients(fields, overlap):
    clipped = {**fields, "max_grad_norm": 0.1}
    assert_same(clipped, [offload_fields(*places, overlap) for places in (PLACES[0], PLACES[1], PLACES[3], PLACES[4])])


def test_clipping_changes_the_weights():
    as_is, clipped = train(optimizer="sgd")[1], train(optimizer="sgd", max_grad_norm=0.1)[1]
    assert not all(torch.equal(as_is[name], weight) for name, weight in clipped.items())
    loose = train(optimizer="sgd", max_grad_norm=1e6)[1]
    assert all(torch.equal(as_is[name], weight) for name, weight in loose.items())
