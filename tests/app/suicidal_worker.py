"""A worker that is killed at a chosen moment: `python suicidal_worker.py MOMENT`. For tests of recovery."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from app.jobs import worker
from app.jobs.attempt import Attempt
from app.settings import Settings


def killed(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after_first_store(store: Any = Attempt._store) -> Any:
    def stored(self: Attempt, key: str, event: Any) -> None:
        store(self, key, event)
        killed()

    return stored


MOMENTS = {
    "before the claim": lambda: setattr(worker.WorkerProcess, "_claim", killed),
    "mid-run": lambda: setattr(Attempt, "_progress", killed),
    "between runs": lambda: setattr(Attempt, "_store", after_first_store()),
    "after the last result": lambda: setattr(Attempt, "_finish", killed),
}
MOMENTS[sys.argv[1]]()
worker.main(Settings(), lifeline=False)
