"""The worker process: claims jobs and sees them through. `remat worker`, or started by `remat serve`.

Lanes are threads that each hold one job at a time: simulations do not wait behind benchmarks. The process that
started the worker holds the other end of its stdin; when that closes, the worker stops, and its runners with it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from datetime import timedelta

from sqlalchemy import delete, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from app.db.migrate import open_database
from app.db.models import Job, Worker, now
from app.db.session import Database
from app.jobs import queue
from app.jobs.attempt import Attempt
from app.jobs.executors import Executor, LocalExecutor
from app.jobs.process import host_name, worker_id
from app.settings import Settings

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
HEARTBEAT_SECONDS = 2.0
FORGET_AFTER = timedelta(days=1)


class WorkerProcess:
    """Lanes, a heartbeat, and the reaping of jobs that other workers left behind."""

    def __init__(self, database: Database, settings: Settings, executor: Executor) -> None:
        self.database, self.settings, self.executor = database, settings, executor
        self.id = worker_id()
        self.stopping = threading.Event()
        self.broken: BaseException | None = None

    def run(self) -> None:
        """Work until `stop`. Raises what broke a lane, so that the process ends and is started afresh."""
        self._beat()
        lanes = ["benchmark"] * self.settings.benchmark_lanes + ["simulation"] * self.settings.simulation_lanes
        threads = [threading.Thread(target=self._lane, args=(lane,), name=lane) for lane in lanes]
        for thread in threads:
            thread.start()
        while not self.stopping.wait(HEARTBEAT_SECONDS):
            self._beat()
        for thread in threads:
            thread.join()
        if self.broken is not None:
            raise self.broken

    def stop(self) -> None:
        self.stopping.set()

    def _beat(self) -> None:
        try:
            with self.database.write() as session:
                beat(session, self.id)
                for job_id in queue.reap(session, self.settings.max_losses):
                    logger.warning("job %s lost its worker", job_id)
        except SQLAlchemyError as error:
            logger.warning("heartbeat not written: %s", error)

    def _lane(self, lane: str) -> None:
        try:
            while not self.stopping.is_set():
                job = self._claim(lane)
                if job is None:
                    self.stopping.wait(POLL_SECONDS)
                    continue
                logger.info("job %s attempt %d started", job.id, job.attempt)
                attempt = Attempt(self.database, self.settings, self.executor, job, self.stopping.is_set)
                logger.info("job %s: %s", job.id, attempt.run())
        except BaseException as error:
            logger.exception("lane %s broke", lane)
            self.broken = error
            self.stopping.set()

    def _claim(self, lane: str) -> Job | None:
        with self.database.write() as session:
            return queue.claim(session, self.id, lane, self.settings.lease_seconds)


def beat(session: Session, identity: str) -> None:
    """This worker lives; those not heard of for a day are forgotten."""
    host, pid, started = identity.rsplit("/", 2)
    row = {"id": identity, "host": host, "pid": int(pid), "pid_started": float(started), "heartbeat_at": now()}
    session.execute(
        insert(Worker)
        .values(**row)
        .on_conflict_do_update(index_elements=[Worker.id], set_={"heartbeat_at": row["heartbeat_at"]})
    )
    session.execute(delete(Worker).where(Worker.heartbeat_at < now() - FORGET_AFTER))


def last_heartbeat_seconds(session: Session) -> float | None:
    """Seconds since any worker was heard of; None if none ever was."""
    latest = session.scalar(select(Worker.heartbeat_at).order_by(Worker.heartbeat_at.desc()).limit(1))
    return None if latest is None else max((now() - latest).total_seconds(), 0.0)


def main(settings: Settings, *, lifeline: bool) -> None:
    """Run a worker until SIGTERM, SIGINT or, with `lifeline`, the end of stdin."""
    database = open_database(settings.data_dir, settings.busy_seconds)
    worker = WorkerProcess(database, settings, LocalExecutor(settings.runner_command, settings.data_dir))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop())
    if lifeline:
        threading.Thread(target=_watch_lifeline, args=(worker,), daemon=True).start()
    logger.info("worker %s on %s: %s", worker.id, host_name(), settings.database_path)
    worker.run()
    database.close()


def _watch_lifeline(worker: WorkerProcess) -> None:
    """Whoever started this worker is gone when stdin ends: give the jobs back, and end whether or not that works."""
    while os.read(0, 1024):
        pass
    worker.stop()
    time.sleep(2)
    os._exit(1)
