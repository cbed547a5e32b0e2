"""Predictions that need torch, for a process that must not import it: one long-lived runner, asked one at a time."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence

from app.errors import RunnerBusy, RunnerDied
from app.jobs.executors import Event, Request, RunnerProcess
from engine.result import Method, RunResult, Timeline
from engine.spec import RunSpec

MAX_WAITING = 8  # requests; each holds a thread of the server


class Simulator:
    """Starts its runner with the first question, keeps it, and replaces it when it has died."""

    def __init__(self, command: Sequence[str], limit_seconds: float) -> None:
        self.command, self.limit_seconds = command, limit_seconds
        self.turn = threading.Lock()
        self.waiting = threading.BoundedSemaphore(MAX_WAITING)
        self.runner: RunnerProcess | None = None
        self.stream: Iterator[Event | None] = iter(())
        self.numbers = itertools.count()

    def answer(self, spec: RunSpec, method: Method) -> tuple[RunResult, Timeline | None]:
        """One result. Raises RunnerBusy if too many wait, RunnerDied if the runner ends or is too slow."""
        if not self.waiting.acquire(blocking=False):
            raise RunnerBusy("too many simulated predictions are waiting; try again shortly")
        try:
            with self.turn:
                return self._ask(spec, method)
        finally:
            self.waiting.release()

    def _ask(self, spec: RunSpec, method: Method) -> tuple[RunResult, Timeline | None]:
        if self.runner is None or self.runner.process.poll() is not None:
            self.close()
            self.runner = RunnerProcess(self.command)
            self.stream = self.runner.events()
        request = Request(f"prediction-{next(self.numbers)}", spec.model_dump(mode="json"), method)
        self.runner.ask(request)
        deadline = time.monotonic() + self.limit_seconds
        try:
            for event in self.stream:
                if event and event["event"] == "result" and event.get("run_id") == request.id:
                    return _read(event)
                if time.monotonic() > deadline:
                    raise RunnerDied(f"no answer within {self.limit_seconds:g} s: submit it as a job instead")
            raise RunnerDied(self.runner.death())
        except RunnerDied:
            self.close()
            raise

    def close(self) -> None:
        if self.runner is not None:
            self.runner.stop(0)
            self.runner = None


def _read(event: Event) -> tuple[RunResult, Timeline | None]:
    if event.get("result") is None:
        raise RunnerDied(str(event.get("error") or "the runner answered without a result"))
    timeline = event.get("timeline")
    return RunResult.model_validate(event["result"]), Timeline.model_validate(timeline) if timeline else None
