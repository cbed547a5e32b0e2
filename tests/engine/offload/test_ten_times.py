"""A model whose parameters and optimizer states are ten times the device's cap trains from NVMe, with the same loss."""

import json
import subprocess
import sys
from typing import Any

import pytest

from engine.architecture import resolve_model
from engine.units import GIB

MODEL, CAP_GIB = "gpt:24,768,12,512", 0.19
CODE = """
import json, sys, torch
torch.set_num_threads(1)
from engine.measure import measure
from engine.spec import RunSpec
print(measure(RunSpec(**json.loads(sys.argv[1])))[0].model_dump_json())
"""


def measured(**fields: Any) -> dict[str, Any]:
    spec = {
        "model": MODEL,
        "seq": 64,
        "checkpointing": "per-layer",
        "precision": "fp32",
        "device": "cpu",
        "warmup": 0,
        "steps": 1,
        **fields,
    }
    done = subprocess.run([sys.executable, "-c", CODE, json.dumps(spec)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
def test_ten_times_the_cap(tmp_path, monkeypatch):
    monkeypatch.setenv("REMAT_NVME_DIR", str(tmp_path))
    assert 12 * resolve_model(MODEL).for_sequence(64).parameters >= 10 * CAP_GIB * GIB
    lower = {"offload_optimizer": "nvme", "offload_parameters": "nvme"}
    plain = measured()
    below = measured(memory_limit_gib=CAP_GIB, **lower)
    assert below["outcome"] == "ok", below["error"]
    assert below["losses"] == plain["losses"]
    assert below["memory"]["device_peak_bytes"] < CAP_GIB * GIB < plain["memory"]["device_peak_bytes"] / 10
    assert list(tmp_path.iterdir()) == []
    assert measured(memory_limit_gib=CAP_GIB)["outcome"] == "oom"
