"""What the tiers below the device hold: the closed form, the simulation and a measured run agree to the byte."""

import pytest

from engine.closed_form import predict
from engine.measure import measure
from engine.result import Memory
from engine.simulate import simulate
from engine.spec import RunSpec

HOST = {"offload_optimizer": "cpu"}
FILE = {"offload_optimizer": "nvme"}
COMBINATIONS = [
    HOST,
    FILE,
    FILE | {"offload_overlap": False},
    HOST | {"offload_parameters": "cpu"},
    FILE | {"offload_parameters": "cpu"},
    FILE | {"offload_parameters": "nvme", "precision": "fp32"},
    FILE | {"offload_parameters": "nvme"},
    FILE | {"grad_accumulation": 3},
    HOST | {"max_grad_norm": 1.0},
    FILE | {"max_grad_norm": 1.0, "grad_accumulation": 2},
    FILE | {"optimizer": "adamw-8bit"},
    FILE | {"offload_activations": "cpu", "seq": 256, "micro_batch": 4, "checkpointing": "per-layer"},
]


def below(memory: Memory) -> dict[str, int | None]:
    return memory.model_dump(include={"host_peak_bytes", "nvme_bytes", "nvme_written_bytes_per_step"})


@pytest.mark.parametrize("fields", COMBINATIONS, ids=lambda fields: " ".join(map(str, fields.values())))
def test_three_ways_agree(fields, tmp_path, monkeypatch):
    monkeypatch.setenv("REMAT_NVME_DIR", str(tmp_path))
    spec = RunSpec(**{"model": "gpt:5,64,4,512", "seq": 64, "device": "cpu", "steps": 2, "warmup": 1, **fields})
    predicted, measured = predict(spec).memory, measure(spec)[0].memory
    assert below(measured) == below(predicted)
    assert below(simulate(spec)[0].memory) == below(predicted)
