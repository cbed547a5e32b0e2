"""One attempt at a job: the runs it still lacks, executed in order, each result stored as it comes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from pydantic import ValidationError

from app.db.models import Job, new_id
from app.db.session import Database
from app.errors import LeaseLost
from app.jobs import log, queue
from app.jobs.executors import Event, Executor, Request, Session
from app.jobs.process import device_lock, try_lock
from app.settings import Settings
from engine.errors import SpecError
from engine.result import RunResult, Timeline
from engine.spec import RunSpec, expand

logger = logging.getLogger(__name__)

RENEW_SECONDS = 0.5  # how fresh progress, and the answer to a cancel, are
TRIES = 2  # a run whose runner dies is tried again once; then it has failed, and the job goes on


class Stopped(Exception):
    """The attempt ends before its runs do; the job becomes `status` ("queued" = given back)."""

    def __init__(self, status: str, error: str | None = None) -> None:
        super().__init__(status)
        self.status = status
        self.error = error


class Attempt:
    """Runs a claimed job. `stopping` tells that the worker wants to end."""

    def __init__(
        self, database: Database, settings: Settings, executor: Executor, job: Job, stopping: Callable[[], bool]
    ) -> None:
        assert job.attempt_token is not None
        self.database, self.settings, self.executor, self.job = database, settings, executor, job
        self.token = job.attempt_token
        self.stopping = stopping
        self.deadline = time.monotonic() + job.timeout_seconds
        self.next_renewal = 0.0
        self.progress: dict[str, Any] | None = None
        self.messages: list[str] = []
        self.deaths: dict[str, int] = {}
        self.specs: dict[str, RunSpec] = {}

    def run(self) -> str:
        """Execute what is missing. The job's final status, "queued" if it was given back, "lost" if it was taken."""
        try:
            self.specs = {spec.spec_hash: spec for spec in expand(self.job.spec, self.job.vary)}
            with ExitStack() as locks:
                if self.job.method == "measured":
                    self._lock_devices(locks)
                while missing := self._missing():
                    self._session(missing)
            return self._finish(*self._verdict())
        except Stopped as stop:
            return self._finish(stop.status, stop.error)
        except (ValidationError, SpecError) as refused:
            return self._finish("failed", f"this version of Remat refuses the job's spec: {refused}")
        except LeaseLost as lost:
            logger.warning("%s", lost)
            return "lost"

    def _missing(self) -> dict[str, RunSpec]:
        with self.database.read() as session:
            done = queue.done_hashes(session, self.job.id)
        return {key: spec for key, spec in self.specs.items() if key not in done}

    def _lock_devices(self, locks: ExitStack) -> None:
        """Wait for the lock of every device that the job measures on: one benchmark at a time."""
        for name in sorted({device_lock(spec.device) for spec in self.specs.values()}):
            waited = False
            while not locks.enter_context(try_lock(self.settings.lock_dir, f"benchmark-{name}")):
                if not waited:
                    self.messages.append(f"waiting for {name}: another benchmark is running")
                waited = True
                self.tick()
                time.sleep(RENEW_SECONDS / 2)

    def _session(self, missing: dict[str, RunSpec]) -> None:
        """One executor session over the missing runs; returns when it has ended, however it did."""
        requests = [Request(key, spec.model_dump(mode="json"), self.job.method) for key, spec in missing.items()]
        session = self.executor.start(f"{self.job.id}-{self.job.attempt}", requests)
        waiting = list(missing)
        try:
            for event in session.events():
                if event is not None:
                    self._handle(event, waiting)
                self.tick()
        except BaseException as error:
            session.stop(self.settings.grace_seconds if isinstance(error, Stopped) and error.status != "queued" else 0)
            raise
        session.stop(0)
        if waiting:
            self._died(waiting[0], session)

    def _handle(self, event: Event, waiting: list[str]) -> None:
        kind, key = event["event"], event.get("run_id")
        if kind == "log":
            self.messages.append(str(event.get("message")))
        elif kind == "progress" and key in waiting:
            self.progress = self._progress(str(key), event)
        elif kind == "result" and key in waiting:
            waiting.remove(str(key))
            self._store(str(key), event)
        elif kind == "result":
            self.messages.append("a result that nobody asked for was dropped")

    def _progress(self, key: str, event: Event) -> dict[str, Any]:
        return {
            "run": list(self.specs).index(key) + 1,
            "runs": len(self.specs),
            "spec": self.specs[key].model_dump(mode="json", exclude_defaults=True),
            **{name: event.get(name) for name in ("phase", "step", "steps")},
        }

    def _store(self, key: str, event: Event) -> None:
        """Keep a result, or a failure in its place if it is not one that this run can have."""
        try:
            result = RunResult.model_validate(event.get("result"))
            timeline = Timeline.model_validate(event["timeline"]) if event.get("timeline") else None
            if (result.spec_hash, result.method) != (key, self.job.method):
                raise ValueError("it is for another run")
        except (ValidationError, ValueError) as error:
            reason = str(event.get("error") or f"the runner's answer is not a result: {error}")
            result, timeline = self._failed(key, reason), None
        # Ids sort by time of storing, which is what resuming a stream of results relies on.
        result = result.model_copy(update={"id": new_id()})
        with self.database.write() as session:
            if not queue.store(session, self.job.id, self.token, result, timeline):
                self.messages.append("a second result of one run was dropped")

    def _failed(self, key: str, reason: str) -> RunResult:
        spec = self.specs[key]
        return RunResult(spec=spec, spec_hash=key, method=self.job.method, outcome="failed", error=reason[:2000])

    def _died(self, key: str, session: Session) -> None:
        """The session ended before this run's result: try the run again, or record that it kills its runner."""
        reason = session.death()
        self.messages.append(reason)
        self.deaths[key] = self.deaths.get(key, 0) + 1
        if self.deaths[key] >= TRIES:
            self._store(key, {"error": f"{reason}, {TRIES} times during this run"})

    def tick(self) -> None:
        """Renew the lease, show progress, write the log; raises Stopped or LeaseLost when the attempt is over."""
        if time.monotonic() < self.next_renewal and not self.stopping():
            return
        self.next_renewal = time.monotonic() + RENEW_SECONDS
        with self.database.write() as session:
            status = queue.renew(session, self.job.id, self.token, self.settings.lease_seconds, self.progress)
            self._flush(session)
        if status == "cancelling":
            raise Stopped("cancelled")
        if time.monotonic() > self.deadline:
            raise Stopped("timed_out", f"stopped after its time limit of {self.job.timeout_seconds:g} s")
        if self.stopping():
            raise Stopped("queued")

    def _flush(self, session: Any) -> None:
        log.append(session, self.job.id, self.messages, self.settings.log_bytes)
        self.messages.clear()

    def _verdict(self) -> tuple[str, str | None]:
        with self.database.read() as session:
            errors = queue.failures(session, self.job.id)
        if not errors:
            return "succeeded", None
        return "failed", f"{len(errors)} of {len(self.specs)} runs failed: {errors[0]}"

    def _finish(self, status: str, error: str | None) -> str:
        with self.database.write() as session:
            self._flush(session)
            if status != "queued":
                return queue.finish(session, self.job.id, self.token, status, error)
            queue.release(session, self.job.id, self.token)
        return status
