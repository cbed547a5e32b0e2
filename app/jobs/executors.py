"""Where runs execute. An executor starts a session, hands it requests, and reads events (docs/architecture.md).

`LocalExecutor` is one `python -m engine.runner` process. Another one needs only to speak the same protocol.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from engine.places import DATA_VARIABLE

Event = dict[str, Any]

TICK_SECONDS = 0.2
LONGEST_LINE = 64 * 2**20  # a result with its timeline is a few MiB; a line without an end is not an event
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Request:
    """One run to execute; `id` names it in events."""

    id: str
    spec: Mapping[str, Any]
    method: str

    def line(self) -> bytes:
        return json.dumps({"run": {"id": self.id, "spec": self.spec, "method": self.method}}).encode() + b"\n"


class Session(Protocol):
    """A started executor."""

    def events(self) -> Iterator[Event | None]:
        """Events as they come, None at every tick without one; ends when the session has."""

    def stop(self, grace_seconds: float) -> None:
        """Ask it to end, and force it after the grace. Idempotent."""

    def death(self) -> str:
        """Why it ended, in words."""


class Executor(Protocol):
    def start(self, name: str, requests: Sequence[Request]) -> Session:
        """Start executing the requests in order."""


class LocalExecutor:
    """Runs on this machine, one runner process a session."""

    def __init__(self, command: Sequence[str], data_dir: Path | None = None) -> None:
        self.command, self.data_dir = command, data_dir

    def start(self, name: str, requests: Sequence[Request]) -> Session:
        runner = RunnerProcess(self.command, self.data_dir)
        for request in requests:
            runner.ask(request)
        runner.end()
        return runner


class RunnerProcess:
    """A runner in a process group of its own. Its stdin is its lifeline: if we die, it closes and the group ends."""

    def __init__(self, command: Sequence[str], data_dir: Path | None = None) -> None:
        """`data_dir`: where it keeps what it measures of the machine; without one, as its environment says."""
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=None if data_dir is None else {**os.environ, DATA_VARIABLE: str(data_dir)},
        )
        self.stdin, self.stdout, self.stderr = (
            stream.fileno() for stream in (self.process.stdin, self.process.stdout, self.process.stderr) if stream
        )
        os.set_blocking(self.stdin, False)
        self.unsent = bytearray()
        self.stopped = False

    def ask(self, request: Request) -> None:
        self.unsent += request.line()

    def probe(self, *, refresh: bool) -> None:
        """Ask for the machine's bandwidths; the answer is a `bandwidths` event."""
        self.unsent += json.dumps({"probe": {"refresh": refresh}}).encode() + b"\n"

    def end(self) -> None:
        """No more requests: finish what was asked, then exit."""
        self.unsent += b'{"end": true}\n'

    def events(self) -> Iterator[Event | None]:
        """Every event, and what the process wrote beside them as `log` events. Ends when its output has."""
        unread = {self.stdout: bytearray(), self.stderr: bytearray()}
        with selectors.DefaultSelector() as selector:
            for descriptor in unread:
                selector.register(descriptor, selectors.EVENT_READ)
            while self.stdout in selector.get_map():
                self._send()
                ready = selector.select(0.01 if self.unsent else TICK_SECONDS)
                if not ready:
                    if self.process.poll() is not None:
                        break  # something it started may still hold the pipe
                    yield None
                for key, _ in ready:
                    chunk = os.read(key.fd, _CHUNK)
                    if not chunk:
                        selector.unregister(key.fd)
                    yield from _parse(unread[key.fd], chunk, is_event=key.fd == self.stdout)
        self.process.wait()

    def _send(self) -> None:
        """Write as much as the pipe takes; the runner reads it while it works."""
        try:
            while self.unsent:
                del self.unsent[: os.write(self.stdin, self.unsent[:_CHUNK])]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.unsent.clear()

    def stop(self, grace_seconds: float) -> None:
        """SIGTERM to the group, then SIGKILL; afterwards no process of it is left."""
        if not self.stopped:
            self.stopped = True
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + grace_seconds
            while self.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
        self._signal(signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream:
                stream.close()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return

    def death(self) -> str:
        code = self.process.wait()
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (the kernel may have been out of memory)" if name == "SIGKILL" else ""
            return f"the runner was killed by {name}{hint}"
        return f"the runner ended with exit code {code}"


def _parse(unread: bytearray, chunk: bytes, *, is_event: bool) -> Iterator[Event]:
    """The lines that `chunk` completes, as events."""
    unread += chunk
    if len(unread) > LONGEST_LINE:
        unread.clear()
        yield log_event("a line longer than 64 MiB was dropped")
    *lines, rest = unread.split(b"\n")
    if not chunk and rest:
        lines, rest = [*lines, rest], bytearray()
    unread[:] = rest
    for line in lines:
        text = line.decode("utf-8", "replace")
        if text.strip():
            yield read_event(text) if is_event else log_event(text)


def read_event(text: str) -> Event:
    """One line of the protocol; anything else is a log line."""
    try:
        event = json.loads(text)
    except (ValueError, RecursionError):
        return log_event(text)
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else log_event(text)


def log_event(message: str) -> Event:
    return {"event": "log", "run_id": None, "message": message}
