"""Stored runs for the pages to show, made as an engine would report them; and one browser a module."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, sync_playwright

from app.db import runs
from app.db.migrate import open_database
from app.db.models import Worker, new_id, now
from app.db.session import Database
from app.jobs import log, queue
from app.main import create_app
from app.settings import Settings
from engine.result import AtPeak, Memory, RunResult, Timeline, Timing
from engine.spec import RunSpec, expand

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)> \"'` {{7*7}} " + "long " * 20

GRID: dict[str, list[Any]] = {"checkpointing": ["none", "sqrt", "per-layer"], "attention": ["standard", "flash"]}
BASE: dict[str, Any] = {"model": "gpt-tiny", "micro_batch": 2, "seq": 256, "precision": "fp32", "device": "cpu"}


def a_result(spec: RunSpec, outcome: str = "ok", **more: Any) -> RunResult:
    """What a run of this spec could have ended with; its numbers follow from the spec alone."""
    peak = 10**8 + 10**7 * spec.micro_batch * (3 if spec.checkpointing == "none" else 1)
    known = outcome == "ok"
    return RunResult(
        id=new_id(),
        spec=spec,
        spec_hash=spec.spec_hash,
        method=more.pop("method", "measured"),
        outcome=outcome,  # type: ignore[arg-type]  # parametrised by tests
        memory=Memory(device_peak_bytes=peak, peak_phase="backward", at_peak=AtPeak(parameters=peak - 7, activations=7))
        if known
        else Memory(),
        timing=Timing(step_seconds=0.5, step_seconds_p20=0.49, step_seconds_p80=0.52, steps=5,
                      tokens_per_second=1000.0 + (500 if spec.checkpointing == "none" else 0)) if known else Timing(),
        error=None if known else more.pop("error", "the device tier is full"),
        environment={"torch": "2.13.0", "device_kind": "cpu", "device_name": "a CPU", "threads": 2},
        **more,
    )  # fmt: skip


def a_timeline() -> Timeline:
    return Timeline(
        x_unit="seconds", x=[0.0, 0.1, 0.2, 0.3], parameters=[100] * 4, gradients=[0, 0, 50, 100],
        optimizer_states=[200] * 4, activations=[0, 500, 300, 0], temporaries=[0, 10, 20, 0],
        phases=[{"name": "forward", "start": 0.0, "end": 0.1}, {"name": "backward", "start": 0.1, "end": 0.3}],
        blocks=[], peak_index=1,
        alive_at_peak=[{"bytes": 500, "category": "activations", "count": 3, "where": "block 0"}],
    )  # fmt: skip


def store_job(
    database: Database,
    outcomes: Sequence[str] = ("ok",) * 6,
    *,
    name: str | None = None,
    status: str = "succeeded",
    **more: Any,
) -> str:
    """A finished job with a result for each outcome. Its id."""
    submission = queue.prepare(BASE, GRID, timeout_seconds=60, name=name)
    with database.write() as session:
        session.merge(Worker(id="here/1/1", host="here", pid=1, pid_started=1.0, heartbeat_at=now()))
        queue.submit(session, submission)
    with database.write() as session:
        job = queue.claim(session, "here/1/1", "benchmark", 30)
        assert job is not None
        assert job.attempt_token is not None
        for spec, outcome in zip(expand(BASE, GRID), outcomes, strict=False):
            queue.store(session, job.id, job.attempt_token, a_result(spec, outcome, **more), a_timeline())
        log.append(session, job.id, ["a line", HOSTILE], 10**6)
        queue.finish(session, job.id, job.attempt_token, status, None if status == "succeeded" else HOSTILE)
    return job.id


def run_ids(database: Database) -> list[str]:
    with database.read() as session:
        return [run["id"] for run in runs.every(session, runs.Filters())]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path="/usr/bin/chromium",
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """A server with one finished job on it: its address, and the addresses of its pages by name."""
    folder: Path = tmp_path_factory.mktemp("shown")
    database = open_database(folder)
    job = store_job(database, ("ok", "ok", "ok", "ok", "oom", "failed"), name=HOSTILE[:190])
    ids = run_ids(database)
    database.close()
    pages = {
        "home": "/", "plan": "/plan?model=llama-2-7b",
        "refused": "/?seq=0", "new": "/jobs/new?precision=bf16&steps=3", "jobs": "/jobs",
        "job": f"/jobs/{job}",
        "explore": "/explore", "runs": "/runs", "run": f"/runs/{ids[0]}", "oom": f"/runs/{ids[4]}",
        "compare": f"/compare?ids={ids[0]}&ids={ids[2]}", "about": "/about",
        "accuracy": "/accuracy", "missing": "/nowhere",
    }  # fmt: skip
    with serving(Settings(data_dir=folder, lock_dir=folder / "locks")) as address:
        yield address, pages


class serving:
    """A server in a thread, on a free port, without a worker."""

    def __init__(self, settings: Settings) -> None:
        config = uvicorn.Config(create_app(settings), port=0, log_level="error", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self) -> str:
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive(), "the server did not start"
            time.sleep(0.02)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(10)


Store = Callable[..., str]


@pytest.fixture
def store(client: object, database: Database) -> Store:
    """store_job on the database that `client` serves."""
    return lambda *args, **more: store_job(database, *args, **more)
