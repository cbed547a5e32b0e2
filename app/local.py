"""Runs of the command line: no server, no queue; the same runner, the same locks, the same database."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from app.jobs.executors import Event, Request, RunnerProcess
from app.jobs.process import device_lock, try_lock
from app.settings import Settings
from engine.result import Method, RunResult, Timeline
from engine.spec import RunSpec

Answer = tuple[RunResult, Timeline | None]
Note = Callable[[str], None]

LOCK_POLL_SECONDS = 0.2


def measured(specs: Sequence[RunSpec], settings: Settings, note: Note) -> Iterator[Answer]:
    """Measure in order; `note` hears of progress. Waits while another benchmark holds a device."""
    names = sorted({device_lock(spec.device) for spec in specs})
    return _locked(names, specs, settings, note)


def _locked(names: Sequence[str], specs: Sequence[RunSpec], settings: Settings, note: Note) -> Iterator[Answer]:
    if not names:
        yield from executed(specs, "measured", settings, note)
        return
    waited = False
    while True:
        with try_lock(settings.lock_dir, f"benchmark-{names[0]}") as mine:
            if mine:
                yield from _locked(names[1:], specs, settings, note)
                return
        if not waited:
            note(f"waiting for {names[0]}: another benchmark is running")
        waited = True
        time.sleep(LOCK_POLL_SECONDS)


def executed(specs: Sequence[RunSpec], method: Method, settings: Settings, note: Note) -> Iterator[Answer]:
    """Each spec's result from a runner process; one that kills its runner has failed, and the rest go on."""
    remaining = {spec.spec_hash: spec for spec in specs}
    while remaining:
        runner = RunnerProcess(settings.runner_command, settings.data_dir)
        try:
            for key, spec in remaining.items():
                runner.ask(Request(key, spec.model_dump(mode="json"), method))
            runner.end()
            for event in runner.events():
                if event is None:
                    continue
                if event["event"] == "result" and event.get("run_id") in remaining:
                    yield _answer(remaining.pop(event["run_id"]), method, event)
                else:
                    _tell(event, note)
            if remaining:
                spec = remaining.pop(next(iter(remaining)))
                yield _failure(spec, method, runner.death()), None
        finally:
            runner.stop(0)


def _answer(spec: RunSpec, method: Method, event: Event) -> Answer:
    if event.get("result") is None:
        return _failure(spec, method, str(event.get("error") or "the runner answered without a result")), None
    timeline = event.get("timeline")
    return RunResult.model_validate(event["result"]), Timeline.model_validate(timeline) if timeline else None


def _failure(spec: RunSpec, method: Method, reason: str) -> RunResult:
    return RunResult(spec=spec, spec_hash=spec.spec_hash, method=method, outcome="failed", error=reason)


def _tell(event: Event, note: Note) -> None:
    if event["event"] == "progress":
        note(f"{event.get('phase')} {event.get('step')}/{event.get('steps')}")
    elif event["event"] == "log":
        note(str(event.get("message")))
