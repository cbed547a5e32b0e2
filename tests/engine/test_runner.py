"""The runner's protocol on real runs: one result a run whatever happens, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

TINY = {"model": "gpt:2,64,2,256", "seq": 32, "precision": "fp32", "device": "cpu", "steps": 2, "warmup": 1}
ENDLESS = {**TINY, "steps": 10_000}


class Runner:
    """A runner process and its lines."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine.runner"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def ask(self, run_id: str, spec: dict[str, Any], method: str = "measured") -> None:
        self.send({"run": {"id": run_id, "spec": spec, "method": method}})

    def send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def next(self, *kinds: str) -> dict[str, Any]:
        """The next event of one of these kinds."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] in kinds:
                return event
        raise AssertionError(f"the runner ended before an event of kind {kinds}")

    def child(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        assert len(children) == 1
        return children[0]

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def runner() -> Iterator[Runner]:
    made = Runner()
    yield made
    made.end()


def gone(process: psutil.Process, within_seconds: float = 3.0) -> bool:
    deadline = time.monotonic() + within_seconds
    while time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_runs_in_order_then_ends(runner: Runner) -> None:
    assert runner.next("ready")["environment"]["torch"]
    runner.ask("a", TINY)
    runner.ask("b", {**TINY, "checkpointing": "per-layer"})
    runner.ask("c", TINY, "simulated")
    runner.ask("d", TINY, "closed-form")
    runner.send({"end": True})
    results = [runner.next("result") for _ in range(4)]
    assert [event["run_id"] for event in results] == ["a", "b", "c", "d"]
    assert [event["result"]["outcome"] for event in results] == ["ok"] * 4
    assert [event["result"]["method"] for event in results] == ["measured", "measured", "simulated", "closed-form"]
    assert results[0]["timeline"]["x"]
    assert results[0]["result"]["environment"]["host_to_device_bytes_per_second"] > 0
    assert runner.process.wait(timeout=10) == 0


def test_bandwidths_are_asked_for_in_turn_with_runs(runner: Runner) -> None:
    runner.ask("a", TINY)
    runner.send({"probe": {"refresh": False}})
    runner.send({"end": True})
    environment = runner.next("result")["result"]["environment"]
    found = runner.next("bandwidths")["bandwidths"]
    assert found.items() <= environment.items()
    assert {"disk", "disk_error"} & found.keys()
    assert runner.process.wait(timeout=10) == 0


def test_a_run_killed_by_the_kernel_fails_and_the_next_goes_on(runner: Runner) -> None:
    runner.next("ready")
    runner.ask("long", ENDLESS)
    runner.ask("next", TINY)
    while runner.next("progress")["phase"] != "timing":
        pass
    runner.child().kill()
    first = runner.next("result")
    assert first["run_id"] == "long"
    assert first["result"]["outcome"] == "failed"
    assert "SIGKILL" in first["result"]["error"]
    assert runner.next("result")["result"]["outcome"] == "ok"


@pytest.mark.parametrize("end", ["kill the runner", "close its stdin"])
def test_no_child_outlives_the_runner_or_its_asker(runner: Runner, end: str) -> None:
    runner.next("ready")
    runner.ask("long", ENDLESS)
    runner.next("progress")
    child = runner.child()
    if end == "kill the runner":
        runner.process.kill()
    else:
        assert runner.process.stdin is not None
        runner.process.stdin.close()
    assert gone(child)
    assert runner.process.wait(timeout=3) == -signal.SIGKILL


def test_out_of_memory_is_a_result_and_the_next_run_goes_on(runner: Runner) -> None:
    runner.next("ready")
    runner.ask("big", {**TINY, "model": "gpt:2,1024,2,8192", "memory_limit_gib": 0.1})
    runner.ask("small", TINY)
    big, small = runner.next("result"), runner.next("result")
    assert big["result"]["outcome"] == "oom"
    assert "102.40 MiB" in big["result"]["error"]
    assert small["result"]["outcome"] == "ok"


def test_what_the_machine_could_never_hold_is_not_tried(runner: Runner) -> None:
    runner.next("ready")
    runner.ask("huge", {**TINY, "model": "llama-3.1-405b", "seq": 131072})
    result = runner.next("result")["result"]
    assert result["outcome"] == "oom"
    assert "not tried, the closed form needs" in result["error"]


def test_a_run_fits_under_a_cap_a_little_above_its_peak(runner: Runner) -> None:
    """Stacks of threads do not count: a cap is for the run."""
    runner.next("ready")
    fields = {**TINY, "model": "gpt:2,512,4,4096"}
    runner.ask("free", fields)
    peak_gib = runner.next("result")["result"]["memory"]["device_peak_bytes"] / 2**30
    runner.ask("capped", {**fields, "memory_limit_gib": peak_gib + 12 / 1024})
    assert runner.next("result")["result"]["outcome"] == "ok"
    runner.ask("short", {**fields, "memory_limit_gib": peak_gib - 4 / 1024})
    assert runner.next("result")["result"]["outcome"] == "oom"


@pytest.mark.parametrize(
    "request_line",
    [{"run": {}}, {"run": {"id": "x"}}, {"run": None}, {}, [], "text", {"run": {"id": "x", "spec": [], "method": 3}}],
    ids=str,
)
def test_nonsense_does_not_end_the_runner(runner: Runner, request_line: Any) -> None:
    runner.next("ready")
    runner.send(request_line)
    runner.ask("after", TINY, "closed-form")
    while (event := runner.next("result", "log"))["event"] != "result" or event["run_id"] != "after":
        pass
    assert event["result"]["outcome"] == "ok"


def test_a_refused_spec_says_why(runner: Runner) -> None:
    runner.next("ready")
    runner.ask("bad", {**TINY, "checkpointing": "every-0"})
    event = runner.next("result")
    assert event["result"] is None
    assert "checkpointing" in event["error"]


def test_the_second_run_starts_its_first_step_within_300_ms(runner: Runner) -> None:
    """No torch import a run: the gap is a fork and a tiny model. The bound is the product's promise."""
    runner.next("ready")
    runner.ask("a", TINY)
    runner.ask("b", TINY)
    runner.next("result")
    start = time.monotonic()
    while runner.next("progress")["phase"] != "warmup":
        pass
    assert time.monotonic() - start < 0.3


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The NVMe tier's folder of the runner that the test asks for next."""
    folder = tmp_path / "nvme"
    monkeypatch.setenv("REMAT_NVME_DIR", str(folder))
    return folder


def refuse_writes(process: psutil.Process, _file: Path) -> None:
    process.rlimit(psutil.RLIMIT_FSIZE, (4096, 4096))


FAULTS: dict[str, tuple[Callable[[psutil.Process, Path], object], str]] = {
    "write refused": (refuse_writes, "the file would be larger than this process may write"),
    "file truncated": (lambda _, file: os.truncate(file, 4096), "the file was truncated to 4.00 KiB of"),
    "directory removed": (lambda _, file: shutil.rmtree(file.parent), "the file or its directory was removed during"),
}


@pytest.mark.parametrize("parameters", ["none", "nvme"])
@pytest.mark.parametrize(("fault", "says"), FAULTS.values(), ids=FAULTS)
def test_a_disk_that_fails_mid_run(
    disk: Path, runner: Runner, fault: Callable[[psutil.Process, Path], object], says: str, parameters: str
) -> None:
    on_disk = {"model": "gpt:6,64,2,256", "offload_optimizer": "nvme", "offload_parameters": parameters}
    runner.ask("long", {**ENDLESS, **on_disk})
    runner.ask("next", {**TINY, **on_disk})
    while runner.next("progress")["phase"] != "timing":
        pass
    fault(runner.child(), next(disk.iterdir()))
    first, second = runner.next("result")["result"], runner.next("result")["result"]
    assert first["outcome"] == "failed"
    assert says in first["error"]
    assert second["outcome"] == "ok"
    assert list(disk.iterdir()) == []


def test_a_run_killed_in_a_write_leaves_no_file(disk: Path, runner: Runner) -> None:
    runner.ask("long", {**ENDLESS, "offload_optimizer": "nvme"})
    while runner.next("progress")["phase"] != "timing":
        pass
    assert len(list(disk.iterdir())) == 1
    runner.child().kill()
    assert "SIGKILL" in runner.next("result")["result"]["error"]
    assert list(disk.iterdir()) == []


def test_what_a_killed_runner_left_is_swept_at_the_next_start(disk: Path, runner: Runner) -> None:
    runner.ask("long", {**ENDLESS, "offload_optimizer": "nvme"})
    while runner.next("progress")["phase"] != "timing":
        pass
    child = runner.child()
    os.killpg(runner.process.pid, signal.SIGKILL)
    assert gone(child)
    assert len(list(disk.iterdir())) == 1
    following = Runner()
    try:
        following.next("ready")
        assert list(disk.iterdir()) == []
    finally:
        following.end()
