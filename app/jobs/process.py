"""This process and others: who a worker is, whether it still lives, and the lock one device's benchmark holds."""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psutil

START_TOLERANCE_SECONDS = 1.0  # the kernel counts a start in ticks since boot; the conversion may round


@cache
def host_name() -> str:
    return socket.gethostname().replace("/", "-")[:100]


def worker_id() -> str:
    """`host/pid/start`: names this process, and no other that gets the same pid later."""
    return f"{host_name()}/{os.getpid()}/{psutil.Process().create_time():.2f}"


def is_alive(pid: int, started: float) -> bool:
    """Whether the process that had this pid and started then is running (a zombie is not)."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < START_TOLERANCE_SECONDS
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def try_lock(directory: Path, name: str) -> Iterator[bool]:
    """Whether this process got the lock; it is held until the block ends, and dies with the process."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / f"{re.sub(r'[^a-z0-9]', '-', name.lower())}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


@cache
def has_nvidia() -> bool:
    """Whether this machine has an NVIDIA card; asked of the driver, without a CUDA context."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return bool(pynvml.nvmlDeviceGetCount() > 0)
    except pynvml.NVMLError:
        return False


def device_lock(device: str) -> str:
    """The lock of the device that a spec's `device` means here."""
    if device == "cpu" or (device == "auto" and not has_nvidia()):
        return "cpu"
    return device.replace("cuda:", "cuda-") if ":" in device else "cuda-0"
