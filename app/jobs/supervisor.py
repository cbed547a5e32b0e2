"""Keeps a worker process running beside the web server, and lets none outlive it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time

from app.settings import Settings

logger = logging.getLogger(__name__)

BACKOFF_SECONDS = (0.2, 1.0, 3.0, 10.0)
HEALTHY_SECONDS = 30.0  # a worker that lived so long starts the backoff afresh
STOP_SECONDS = 5.0


class Supervisor:
    """Starts `remat worker`, and starts it again when it ends. The worker's stdin is its lifeline."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._keep_running, name="supervisor", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """End the worker; it gives its jobs back."""
        self.stopping.set()
        if self.thread.is_alive():
            self.thread.join(STOP_SECONDS + 2)

    def _keep_running(self) -> None:
        failures = 0
        while not self.stopping.is_set():
            started = time.monotonic()
            self._run_once()
            failures = 0 if time.monotonic() - started > HEALTHY_SECONDS else failures + 1
            if not self.stopping.is_set():
                pause = BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS)) - 1]
                logger.warning("the worker ended; a new one starts in %g s", pause)
                self.stopping.wait(pause)

    def _run_once(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "app.cli", "worker", "--lifeline"],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **self.settings.environment()},
        )
        while process.poll() is None and not self.stopping.is_set():
            self.stopping.wait(0.2)
        assert process.stdin
        process.stdin.close()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
