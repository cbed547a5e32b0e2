"""What can go wrong in the app, beside the engine's own errors (engine/errors.py).

AppError
├── AddressRefused    the server cannot listen where it was told to       exit 1, before serving
├── DatabaseRefused   the database is newer, corrupt or read-only           exit 1, before serving
├── KeyReused         an Idempotency-Key came with a different request      HTTP 422
├── LeaseLost         another attempt owns the job now                      the worker drops it
├── RunnerDied        the runner process ended before its answer            HTTP 502, exit 1
├── RunnerBusy        too many simulated predictions are waiting            HTTP 503
├── SettingsRefused   a REMAT_* variable or its flag has a wrong value      exit 2
├── Refused           a server refused what the client asked                exit 2
└── Unreachable       no server answers the client                          exit 1
"""

from __future__ import annotations

from typing import Any


class AppError(Exception):
    """Base of what is shown to a person as one line, and ends a command with `exit_code`."""

    exit_code = 1


class AddressRefused(AppError):
    """Nothing can listen on this address and port now; the message says why."""


class DatabaseRefused(AppError):
    """The database cannot be used as it is; the message says why and what to do."""


class KeyReused(AppError):
    """The Idempotency-Key was used for a different request."""


class LeaseLost(AppError):
    """Another attempt owns the job now: stop, and write nothing more."""


class RunnerDied(AppError):
    """The runner process ended, or was too slow, before it answered."""


class RunnerBusy(AppError):
    """Too many simulated predictions are waiting."""


class SettingsRefused(AppError):
    """A setting has a value that is not accepted."""

    exit_code = 2


class Refused(AppError):
    """A server answered with a problem; `status` is its HTTP status, `problem` the document."""

    exit_code = 2

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        super().__init__(str(problem.get("detail") or problem.get("title") or f"HTTP {status}"))
        self.status = status
        self.problem = problem


class Unreachable(AppError):
    """No server answers at this address."""
