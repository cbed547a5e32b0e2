"""The process that executes runs: imports torch once, then forks a fresh child for each run. `python -m engine.runner`.

One JSON object a line in both directions; the protocol is in docs/architecture.md. The parent never starts a thread
and never touches CUDA, so a fork is safe and costs milliseconds. Standard input is the lifeline: when whoever asked
is gone, it closes, and the whole process group dies.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, get_args

# The only CUDA check that does not create a context in the process that will fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
# A waiting thread spins for microseconds, then sleeps. Spinning on, two runs on one machine slow each other down
# ninefold; sleeping at once, every small operation of a run alone costs 50 µs more.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# numpy's BLAS starts its threads on import; a process that forks must have none, and nothing here uses them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from pydantic import ValidationError

from engine.closed_form import predict
from engine.environment import environment
from engine.errors import RematError
from engine.heap import keep_freed_memory
from engine.measure import measure
from engine.offload.nvme import sweep
from engine.offload.probe import bandwidths
from engine.result import Method, RunResult, Timeline
from engine.simulate import simulate
from engine.spec import RunSpec
from engine.training import resolve_device

Emit = Callable[[dict[str, Any]], None]

PR_SET_PDEATHSIG = 1
OOM_SCORE = "500"  # the kernel should kill a run before the worker or the server


# What torch imports on its first step (0.9 s): once here, and not in every child.
importlib.import_module("torch._dynamo")


def main() -> None:
    """Serve requests from stdin until `end` or the end of the file."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    events = os.dup(1)
    os.dup2(2, 1)  # a library's stray print must not look like an event
    keep_freed_memory()
    Runner(events).serve()


class Runner:
    """The parent: a queue of requests, at most one child, no threads."""

    def __init__(self, events: int) -> None:
        self.events = events
        self.requests: deque[dict[str, Any]] = deque()
        self.unread = b""
        self.ending = False

    def emit(self, event: dict[str, Any]) -> None:
        _write_all(self.events, json.dumps(event).encode() + b"\n")

    def serve(self) -> None:
        sweep()
        for line in self._child(lambda emit: emit({"event": "ready", "environment": _facts()}), "ready")[0]:
            _write_all(self.events, line + b"\n")
        while self.requests or not self.ending:
            while not self.requests and not self.ending:
                self._read_requests()
            if self.requests:
                self._answer(self.requests.popleft())

    def _answer(self, request: dict[str, Any]) -> None:
        if "refresh" not in request:
            self._run(request)
            return
        self._child(lambda emit: emit({"event": "bandwidths", "bandwidths": _bandwidths(request["refresh"])}), "probe")

    def _read_requests(self) -> None:
        """Read what stdin has; the end of the file means that nobody is left to answer to."""
        chunk = os.read(0, 1 << 16)
        if not chunk:
            os.killpg(0, signal.SIGKILL)
        *lines, self.unread = (self.unread + chunk).split(b"\n")
        for line in filter(bytes.strip, lines):
            self._accept(line)

    def _accept(self, line: bytes) -> None:
        try:
            request = json.loads(line)
            if request.get("end"):
                self.ending = True
                return
            if "probe" in request:
                self.requests.append({"refresh": bool(request["probe"]["refresh"])})
                return
            run = request["run"]
            if run["method"] not in get_args(Method):
                raise ValueError(f"method must be one of {', '.join(get_args(Method))}")
            self.requests.append({"id": str(run["id"]), "spec": run["spec"], "method": run["method"]})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.emit({"event": "log", "run_id": None, "message": f"request not understood: {error!r}"})

    def _run(self, request: dict[str, Any]) -> None:
        """Fork a child for the request; exactly one result leaves, whatever happens to it."""
        finished, status = self._child(lambda emit: _execute(request, emit), request["id"])
        if any(_is_result(line) for line in finished):
            return
        sweep()  # a killed run leaves its NVMe file
        reason = _death(status)
        self.emit({"event": "log", "run_id": request["id"], "message": reason})
        self.emit(_failure(request, reason))

    def _child(self, work: Callable[[Emit], None], name: str) -> tuple[list[bytes], int]:
        """Run `work` in a forked child, forwarding its lines as they come. The lines kept, and the wait status."""
        reading, writing = os.pipe()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            _become_child(parent, reading)
            try:
                work(lambda event: _write_all(writing, json.dumps(event).encode() + b"\n"))
            except BaseException:  # the child must never return into the parent's loop
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(writing)
        lines = self._forward(reading, keep=name == "ready")
        os.close(reading)
        return lines, os.waitpid(child, 0)[1]

    def _forward(self, reading: int, keep: bool) -> list[bytes]:
        """Copy the child's lines to the events stream until it ends, reading requests meanwhile."""
        kept: list[bytes] = []
        unread = b""
        while True:
            ready, _, _ = select.select([reading, 0] if not self.ending else [reading], [], [])
            if 0 in ready:
                self._read_requests()
            if reading in ready:
                chunk = os.read(reading, 1 << 16)
                if not chunk:
                    return kept
                *lines, unread = (unread + chunk).split(b"\n")
                for line in lines:
                    if keep or _is_result(line):
                        kept.append(line)
                    if not keep:
                        _write_all(self.events, line + b"\n")


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _is_result(line: bytes) -> bool:
    return line.startswith(b'{"event": "result"')


def _become_child(parent: int, reading: int) -> None:
    """Die with the parent, be the kernel's first choice when memory runs out, and leave stdin alone."""
    os.close(reading)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(OOM_SCORE)
    except OSError as error:
        print(f"oom_score_adj not set: {error}", file=sys.stderr)


def _facts() -> dict[str, Any]:
    return environment(resolve_device("auto"))


def _bandwidths(refresh: bool) -> dict[str, Any]:
    return bandwidths(resolve_device("auto"), refresh=refresh)


def _death(status: int) -> str:
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        hint = " (the kernel may have been out of memory)" if name == "SIGKILL" else ""
        return f"the run was killed by {name}{hint}"
    return f"the run ended with exit code {os.waitstatus_to_exitcode(status)} and no result"


def _execute(request: dict[str, Any], emit: Emit) -> None:
    """One run in the child: progress as it goes, then its result."""
    run_id = request["id"]

    def progress(phase: str, step: int, steps: int) -> None:
        emit({"event": "progress", "run_id": run_id, "phase": phase, "step": step, "steps": steps})

    try:
        result, timeline = _by_method(RunSpec.model_validate(request["spec"]), request["method"], progress)
    except (ValidationError, RematError) as error:
        emit(_failure(request, str(error)))
    except Exception as error:  # a run's failure is data: the job goes on with its next run
        traceback.print_exc()
        emit({"event": "log", "run_id": run_id, "message": traceback.format_exc(limit=-6)})
        emit(_failure(request, f"{type(error).__name__}: {error}"))
    else:
        emit(_result_event(run_id, result, timeline))


def _by_method(
    spec: RunSpec, method: Method, progress: Callable[[str, int, int], None]
) -> tuple[RunResult, Timeline | None]:
    if method == "measured":
        result, timeline = measure(spec, progress)
        # After the run, which a measurement of the machine must not disturb.
        result.environment |= bandwidths(resolve_device(spec.device))
        return result, timeline
    if method == "simulated":
        progress("simulate", 1, 1)
        return simulate(spec)
    return predict(spec), None


def _result_event(run_id: str, result: RunResult, timeline: Timeline | None) -> dict[str, Any]:
    return {
        "event": "result",
        "run_id": run_id,
        "result": result.model_dump(mode="json"),
        "timeline": timeline.model_dump(mode="json") if timeline else None,
    }


def _failure(request: dict[str, Any], reason: str) -> dict[str, Any]:
    """A `failed` result. It needs a valid spec; a request without one gets a result without a body."""
    try:
        spec = RunSpec.model_validate(request["spec"])
    except ValidationError:
        return {"event": "result", "run_id": request["id"], "result": None, "timeline": None, "error": reason}
    result = RunResult(
        spec=spec, spec_hash=spec.spec_hash, method=request["method"], outcome="failed", error=reason[:2000]
    )
    return _result_event(request["id"], result, None)


if __name__ == "__main__":
    main()
