"""What the app's tests share: settings on a temporary directory, a database, a client, a worker in this process."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest
from starlette.testclient import TestClient

from app.db import runs
from app.db.migrate import open_database
from app.db.models import Job
from app.db.session import Database
from app.jobs import log, queue
from app.jobs.executors import LocalExecutor
from app.jobs.worker import WorkerProcess
from app.main import create_app
from app.settings import Settings

FAKE = Path(__file__).parent / "fake_runner.py"
ORIGIN = "http://localhost"

MakeSettings = Callable[..., Settings]


def fake_command(behaviour: str) -> tuple[str, ...]:
    return sys.executable, str(FAKE), behaviour


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh database to copy: migrating one takes longer than most tests."""
    folder = tmp_path_factory.mktemp("migrated")
    with closing(open_database(folder)):
        return folder / "remat.sqlite"


@pytest.fixture
def make_settings(tmp_path: Path, migrated: Path) -> MakeSettings:
    """Settings in this test's directory, with a fresh database and a fake runner of the given behaviour."""
    (tmp_path / "data").mkdir()
    shutil.copy(migrated, tmp_path / "data")

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
def new_client() -> Callable[[Settings], TestClient]:
    """Make a client of an application; entering it starts the application."""
    return lambda settings: TestClient(
        create_app(settings), ORIGIN, raise_server_exceptions=False, root_path=settings.root_path
    )


@pytest.fixture
def client(settings: Settings, new_client: Callable[[Settings], TestClient]) -> Iterator[TestClient]:
    """A client of the application; nothing works on its jobs."""
    with new_client(settings) as made:
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


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for a condition, and fail if it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.03)


@pytest.fixture
def until() -> Callable[..., None]:
    return wait_until


class Board:
    """Jobs of a database, as a test submits and watches them."""

    spec: ClassVar[dict[str, Any]] = {"model": "gpt-tiny", "device": "cpu"}

    def __init__(self, database: Database) -> None:
        self.database = database

    def submit(self, seqs: Sequence[int] = (8, 16), **more: Any) -> str:
        prepared = queue.prepare(self.spec, {"seq": list(seqs)}, **{"timeout_seconds": 60.0, **more})
        with self.database.write() as session:
            return queue.submit(session, prepared)[0].id

    def job(self, job_id: str) -> Job:
        with self.database.read() as session:
            return session.get_one(Job, job_id)

    def current_run(self, job_id: str) -> int | None:
        """Which of the job's runs is going on."""
        return (self.job(job_id).progress or {}).get("run")

    def ended(self, job_id: str, seconds: float = 20.0) -> Job:
        wait_until(lambda: queue.is_final(self.job(job_id).status), seconds)
        return self.job(job_id)

    def results(self, job_id: str) -> list[dict[str, Any]]:
        with self.database.read() as session:
            return runs.of_job(session, job_id)

    def lines(self, job_id: str) -> list[str]:
        with self.database.read() as session:
            return [line["message"] for line in log.after(session, job_id)]


@pytest.fixture
def board(database: Database) -> Board:
    return Board(database)
