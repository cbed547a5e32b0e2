"""What can go wrong in the app, beside the engine's own errors (engine/errors.py).

AppError
├── DatabaseRefused   the database is newer, corrupt or read-only           exit 1, before serving
├── KeyReused         an Idempotency-Key came with a different request      HTTP 422
├── LeaseLost         another attempt owns the job now                      the worker drops it
├── RunnerDied        the runner process ended before its answer            HTTP 502, exit 1
└── RunnerBusy        too many simulated predictions are waiting            HTTP 503
"""

from __future__ import annotations


class AppError(Exception):
    """Base of what is shown to a person as one line."""


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
