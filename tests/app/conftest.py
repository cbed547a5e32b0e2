"""What the app's tests share: settings on a temporary directory, a database, a client, a worker in this process."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from app.db.migrate import open_database
from app.db.session import Database
from app.jobs.executors import LocalExecutor
from app.jobs.worker import WorkerProcess
from app.main import create_app
from app.settings import Settings

FAKE = Path(__file__).parent / "fake_runner.py"
ORIGIN = "http://localhost"

MakeSettings = Callable[..., Settings]


def fake_command(behaviour: str) -> tuple[str, ...]:
    return sys.executable, str(FAKE), behaviour


@pytest.fixture
def make_settings(tmp_path: Path) -> MakeSettings:
    """Settings in this test's directory, with a fake runner of the given behaviour."""

    def make(behaviour: str = "quick", **more: object) -> Settings:
        fields = {"data_dir": tmp_path / "data", "lock_dir": tmp_path / "locks", "grace_seconds": 0.5}
        return Settings.model_validate({**fields, "runner_command": fake_command(behaviour), **more})

    return make


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings()


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    opened = open_database(settings.data_dir)
    yield opened
    opened.close()


@pytest.fixture
def client(settings: Settings) -> Iterator[TestClient]:
    """A client of the application; nothing works on its jobs."""
    with TestClient(create_app(settings), base_url=ORIGIN, raise_server_exceptions=False) as made:
        yield made


@pytest.fixture
def start_worker(make_settings: MakeSettings) -> Iterator[Callable[..., WorkerProcess]]:
    """Start a worker's threads in this process; they are stopped when the test ends."""
    started: list[tuple[WorkerProcess, threading.Thread, Database]] = []

    def start(behaviour: str = "quick", **more: object) -> WorkerProcess:
        chosen = make_settings(behaviour, **more)
        opened = open_database(chosen.data_dir)
        worker = WorkerProcess(opened, chosen, LocalExecutor(chosen.runner_command))
        thread = threading.Thread(target=worker.run)
        thread.start()
        started.append((worker, thread, opened))
        return worker

    yield start
    for worker, thread, opened in started:
        worker.stop()
        thread.join(10)
        opened.close()


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for a condition, and fail if it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.03)
