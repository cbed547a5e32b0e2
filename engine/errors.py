"""What can go wrong in the engine.

RematError
├── SpecError            bad input: names the field and what is accepted     HTTP 422, exit 2
├── UnsupportedError     understood, but this method or device cannot do it  HTTP 422, exit 2
└── RunError             the run itself failed                               outcome "failed", exit 1
    ├── OutOfMemory      the device tier is full: a result, not a failure    outcome "oom"
    └── StorageError     the NVMe tier: disk full, read-only, I/O error
"""

from __future__ import annotations


class RematError(Exception):
    """Base of every error that is shown to a person as one line."""


class SpecError(RematError, ValueError):
    """Bad input. `field` is the RunSpec key at fault.

    It is a ValueError so that pydantic turns it into a validation error when it is raised inside a validator.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class UnsupportedError(SpecError):
    """The spec makes sense, but the method or the device asked for cannot serve it."""


class RunError(RematError):
    """A run failed for a reason worth showing as it stands."""


class OutOfMemory(RunError):
    """The device tier could not hold the run."""


class StorageError(RunError):
    """The NVMe tier failed: no space, read-only, wrong file system, I/O error."""
