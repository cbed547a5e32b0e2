"""Two ranks on their halves of a batch train like one process on the whole; a dead rank ends the run."""

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from engine.closed_form import predict
from engine.errors import RunError, UnsupportedError
from engine.measure import measure
from engine.result import RunResult
from engine.sharding import launch
from engine.simulate import simulate
from engine.spec import RunSpec

MODEL = {"model": "gpt:2,64,4,256", "seq": 32, "precision": "fp32", "device": "cpu", "steps": 2, "warmup": 1}


def run(**fields: Any) -> RunResult:
    result, _ = measure(RunSpec(**{**MODEL, **fields}))
    assert result.outcome == "ok", result.error
    return result


def assert_predicted(result: RunResult) -> None:
    """Every rank's peak is the simulated one and, almost, the closed form's."""
    peaks = [rank["device_peak_bytes"] for rank in result.ranks]
    assert peaks == pytest.approx([simulate(result.spec)[0].memory.device_peak_bytes] * len(peaks), rel=1e-4)
    assert peaks == pytest.approx([predict(result.spec).memory.device_peak_bytes] * len(peaks), rel=0.005)


@pytest.fixture(scope="module")
def alone() -> RunResult:
    return run(micro_batch=2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["none", "zero-1", "zero-3"])
def test_losses_equal_those_of_one_process_and_ranks_hold_their_share(stage, alone):
    together = run(micro_batch=1, world_size=2, sharding=stage)
    assert together.losses == pytest.approx(alone.losses, rel=1e-5)
    assert [rank["rank"] for rank in together.ranks] == [0, 1]
    assert together.ranks[0]["device_peak_bytes"] == together.ranks[1]["device_peak_bytes"]
    share = together.memory.at_peak.optimizer_states / alone.memory.at_peak.optimizer_states
    assert share == pytest.approx(1.0 if stage == "none" else 0.5, rel=0.01)
    parameters = together.memory.at_peak.parameters / alone.memory.at_peak.parameters
    assert parameters == pytest.approx(0.5 if stage == "zero-3" else 1.0, rel=0.01)
    assert_predicted(together)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "stage", "checkpointing", "micro_batches"),
    [
        ("gpt:4,128,4,512", "zero-2", "none", 1),
        ("llama:4,128,4,2,344,512", "zero-3", "per-layer", 1),
        ("llama:4,128,4,2,344,512", "zero-1", "none", 2),
        ("llama:4,128,4,2,344,512", "zero-2", "per-layer", 2),
        ("gpt:4,128,4,512", "zero-3", "per-layer", 2),
    ],
)
def test_every_rank_peaks_where_predictions_say(model, stage, checkpointing, micro_batches):
    fields = {"sharding": stage, "checkpointing": checkpointing, "grad_accumulation": micro_batches}
    result = run(model=model, world_size=2, steps=1, seq=64, **fields)
    assert_predicted(result)


@pytest.mark.parametrize("ranks", [8, 64, 1024])
@pytest.mark.parametrize("stage", ["zero-1", "zero-2", "zero-3"])
def test_predictions_for_any_number_of_ranks_need_no_processes(stage, ranks):
    start = time.perf_counter()
    memory = predict(RunSpec(model="llama-2-7b", sharding=stage, world_size=ranks, checkpointing="per-layer")).memory
    assert time.perf_counter() - start < 0.2
    assert sum(memory.at_peak.model_dump().values()) == memory.device_peak_bytes


@pytest.mark.slow
def test_gradients_accumulate_over_micro_batches(alone):
    together = run(micro_batch=1, world_size=2, sharding="zero-2", grad_accumulation=2, checkpointing="per-layer")
    apart = run(micro_batch=2, grad_accumulation=2)
    assert together.losses == pytest.approx(apart.losses, rel=1e-5)
    assert_predicted(together)


@pytest.mark.slow
def test_a_transformers_class_is_sharded_by_fsdp2_too():
    """Its standard loss, and a policy whose groups each rank works out alone."""
    widths = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = {"model_type": "llama", **widths, "num_key_value_heads": 1, "vocab_size": 512}
    result = run(model=model, sharding="zero-3", world_size=2, checkpointing="selective", steps=1)
    peaks = [rank["device_peak_bytes"] for rank in result.ranks]
    assert peaks == pytest.approx([simulate(result.spec)[0].memory.device_peak_bytes] * 2, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["none", "zero-1", "zero-2", "zero-3"])
def test_the_norm_that_clips_is_that_of_all_ranks(stage):
    fields = {"optimizer": "sgd", "steps": 4, "max_grad_norm": 0.5}
    together = run(micro_batch=1, world_size=2, sharding=stage, **fields)
    apart, as_is = run(micro_batch=2, **fields), run(micro_batch=2, **{**fields, "max_grad_norm": None})
    assert together.losses == pytest.approx(apart.losses, rel=1e-6)
    assert together.losses != pytest.approx(as_is.losses, rel=1e-5)


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_and_leaves_no_process(monkeypatch):
    started = []
    start = launch._start

    def remember(*arguments):
        started.append(start(*arguments))
        return started[-1]

    def kill(phase, step, steps):
        if phase == "timing" and step == 1:
            os.kill(started[1].pid, signal.SIGKILL)

    monkeypatch.setattr(launch, "_start", remember)
    with pytest.raises(RunError, match=r"rank 1 was killed by SIGKILL|rank 0: .*[Cc]onnection"):
        measure(RunSpec(**{**MODEL, "steps": 500, "world_size": 2, "sharding": "zero-1"}), kill)
    assert [process.poll() is not None for process in started] == [True, True]


@pytest.mark.slow
def test_a_rank_dies_with_its_launcher(tmp_path):
    task = {"spec": RunSpec(**MODEL, world_size=2).model_dump(mode="json"), "device": "cpu", "rank": 0}
    rank = subprocess.Popen([sys.executable, "-m", "engine.sharding.rank"], stdin=subprocess.PIPE)
    assert rank.stdin is not None
    rank.stdin.write(json.dumps({**task, "store": str(tmp_path / "store")}).encode() + b"\n")
    rank.stdin.flush()
    time.sleep(1)
    assert rank.poll() is None  # it waits for rank 1, which never comes
    rank.stdin.close()
    assert rank.wait(timeout=30) == 1


def test_more_ranks_than_a_machine_measures():
    with pytest.raises(UnsupportedError, match="world_size: at most 16 ranks"):
        measure(RunSpec(**MODEL, world_size=1024, sharding="zero-3"))


def test_offloading_with_ranks_on_a_cpu_says_what_it_lacks():
    with pytest.raises(
        UnsupportedError, match=r"world_size, offload_\*: ranks are measured with offloading only as zero-3 on"
    ):
        measure(RunSpec(**MODEL, world_size=2, sharding="zero-3", offload_optimizer="cpu"))
