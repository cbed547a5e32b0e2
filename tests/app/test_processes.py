"""Real processes, killed at the worst moments: nothing is left behind, nothing is lost, nothing happens twice."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import pytest

from app.settings import Settings

Until = Callable[..., None]
REMAT = (sys.executable, "-m", "app.cli")
SUICIDAL = Path(__file__).parent / "suicidal_worker.py"
MAX_CPU_SECONDS = 2.0
MAX_RSS_BYTES = 150 * 2**20


class Server:
    """`remat serve` as a process of its own."""

    def __init__(self, settings: Settings, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        environment = {**os.environ, **settings.environment(), "REMAT_PORT": str(self.port)}
        self.process = subprocess.Popen([*REMAT, "serve", *options], env=environment, stderr=subprocess.DEVNULL)
        self.known: set[psutil.Process] = set()

    def get(self, path: str) -> Any:
        with urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as response:
            return json.load(response)

    def up(self) -> bool:
        try:
            return bool(self.get("/healthz"))
        except OSError:
            return False

    def submit(self, **body: Any) -> str:
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = Request(f"http://127.0.0.1:{self.port}/api/v1/jobs", data, headers)
        with urlopen(request, timeout=10) as response:
            return str(json.load(response)["id"])

    def descendants(self) -> list[psutil.Process]:
        """Every process that it has started, or that those have; those seen before are remembered."""
        if self.process.poll() is None:
            self.known |= set(psutil.Process(self.process.pid).children(recursive=True))
        return [process for process in self.known if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    def kill(self) -> None:
        self.descendants()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def serve(until: Until) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(settings: Settings, *options: str) -> Server:
        server = Server(settings, *options)
        started.append(server)
        until(server.up, 30)
        return server

    yield start
    for server in started:
        server.descendants()
        if server.process.poll() is None:
            server.process.terminate()
            server.process.wait(15)
        assert server.descendants() == []


BODY = {"spec": {"model": "gpt-tiny", "device": "cpu"}, "vary": {"seq": [8, 16]}}


@pytest.mark.slow
def test_the_web_process_is_light_and_starts_at_once(serve: Callable[..., Server], settings: Settings) -> None:
    server = serve(settings, "--no-worker")
    process = psutil.Process(server.process.pid)
    used = process.cpu_times()
    server.get("/api/v1/models")
    urlopen(f"http://127.0.0.1:{server.port}/", timeout=10).read()
    assert used.user + used.system < MAX_CPU_SECONDS
    assert process.memory_info().rss < MAX_RSS_BYTES
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.slow
def test_a_killed_server_leaves_nothing_and_the_job_ends_after_a_restart(
    serve: Callable[..., Server], make_settings: Callable[..., Settings], board: Any, until: Until
) -> None:
    server = serve(make_settings("grandchild"))
    job_id = server.submit(**BODY)
    until(lambda: board.current_run(job_id) == 2)
    server.kill()
    until(lambda: not server.descendants(), 3)
    again = serve(make_settings("quick"))
    job = board.ended(job_id)
    assert (job.status, job.runs_done) == ("succeeded", 2)
    assert len(again.get(f"/api/v1/runs?job_id={job_id}")["items"]) == 2


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_its_job_goes_on(
    serve: Callable[..., Server], make_settings: Callable[..., Settings], board: Any, until: Until
) -> None:
    server = serve(make_settings("slow"))
    job_id = server.submit(**BODY)
    until(lambda: board.current_run(job_id) == 2)
    (worker,) = psutil.Process(server.process.pid).children()
    runners = worker.children(recursive=True)
    worker.kill()
    until(lambda: not any(runner.is_running() for runner in runners), 3)
    until(lambda: board.job(job_id).attempt == 2 and board.job(job_id).status == "running", 10)
    assert len(board.results(job_id)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "kept"), [("before the claim", 0), ("mid-run", 0), ("between runs", 1), ("after the last result", 2)]
)
def test_a_worker_killed_at_any_moment_loses_nothing(
    make_settings: Callable[..., Settings],
    start_worker: Callable[..., Any],
    board: Any,
    until: Until,
    moment: str,
    kept: int,
) -> None:
    job_id = board.submit()
    environment = {**os.environ, **make_settings("quick").environment()}
    first = subprocess.Popen([sys.executable, str(SUICIDAL), moment], env=environment, stderr=subprocess.DEVNULL)
    runners: set[psutil.Process] = set()
    while first.poll() is None:
        runners |= set(psutil.Process(first.pid).children(recursive=True))
        time.sleep(0.01)
    assert first.returncode == -signal.SIGKILL
    until(lambda: not any(runner.is_running() for runner in runners), 3)
    before = board.results(job_id)
    assert len(before) == kept
    start_worker("quick")
    job = board.ended(job_id)
    assert (job.status, job.runs_done) == ("succeeded", 2)
    assert board.results(job_id)[:kept] == before
    assert len({result["spec_hash"] for result in board.results(job_id)}) == 2


@pytest.mark.slow
def test_the_server_stops_while_a_stream_is_open(
    serve: Callable[..., Server], make_settings: Callable[..., Settings]
) -> None:
    server = serve(make_settings("slow"))
    job_id = server.submit(**BODY)
    with urlopen(f"http://127.0.0.1:{server.port}/api/v1/jobs/{job_id}/events", timeout=10) as stream:
        assert stream.readline()
        started = time.monotonic()
        server.descendants()
        server.process.terminate()
        server.process.wait(10)
    assert time.monotonic() - started < 6
    assert server.descendants() == []


@pytest.mark.slow
def test_a_job_of_real_runs_makes_a_curve(serve: Callable[..., Server], make_settings: Any, board: Any) -> None:
    server = serve(make_settings(runner_command=(sys.executable, "-m", "engine.runner")))
    spec = {"model": "gpt:2,64,2,256", "seq": 64, "precision": "fp32", "device": "cpu", "steps": 2, "warmup": 1}
    vary = {"checkpointing": ["none", "per-layer"], "attention": ["standard", "flash"]}
    job_id = server.submit(spec=spec, vary=vary)
    job = board.ended(job_id, 120)
    assert (job.status, job.error) == ("succeeded", None)
    curve = server.get(f"/api/v1/tradeoff?job_id={job_id}")
    assert len(curve["points"]) == 4
    assert curve["frontier"]
    assert curve["knee"] in curve["frontier"]
    run_id = curve["points"][0]["id"]
    assert server.get(f"/api/v1/runs/{run_id}/timeline")["x_unit"] == "seconds"
