"""`remat doctor`: what this installation has, what it lacks, and what to do about it."""

from __future__ import annotations

import platform
import shutil
import sqlite3
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from app.db.migrate import HEAD, current_revision
from app.errors import DatabaseRefused
from app.jobs.executors import RunnerProcess
from app.jobs.process import has_nvidia
from app.settings import Settings
from engine.units import format_bytes, format_count

WAL_RESET_FIXED = ((3, 44, 6), (3, 50, 7), (3, 51, 3))
"""First releases without the WAL-reset bug, which can lose commits of two connections (sqlite.org/wal.html)."""
NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"}
LOW_DISK_BYTES = 2**30


class Finding(NamedTuple):
    state: Literal["ok", "warning", "error"]
    what: str
    fact: str


def findings(settings: Settings, *, refresh: bool = False) -> Iterator[Finding]:
    """Every check; an `error` means that Remat will not work. `refresh`: bandwidths known from before are measured
    again."""
    yield Finding(
        "ok", "remat", f"{version('remat')}, Python {platform.python_version()}, {platform.platform(terse=True)}"
    )
    yield _sqlite()
    yield _database(settings)
    yield from _disk(settings)
    yield from _runner(settings, refresh)
    yield from _extras()


def _sqlite() -> Finding:
    found = sqlite3.sqlite_version_info
    fixed = any(found[:2] == first[:2] and found >= first for first in WAL_RESET_FIXED) or found >= WAL_RESET_FIXED[-1]
    if fixed:
        return Finding("ok", "SQLite", sqlite3.sqlite_version)
    advice = "has the WAL-reset bug unless your distribution patched it; 3.51.3 fixes it. Keep backups."
    return Finding("warning", "SQLite", f"{sqlite3.sqlite_version} {advice}")


def _database(settings: Settings) -> Finding:
    path = settings.database_path
    if not path.exists():
        return Finding("ok", "database", f"{path} (made at the first start)")
    try:
        revision = current_revision(path)
    except (sqlite3.Error, DatabaseRefused) as error:
        return Finding("error", "database", f"{path}: {error}")
    return Finding("ok", "database", f"{path}, schema {revision} (this version has {HEAD})")


def _disk(settings: Settings) -> Iterator[Finding]:
    folder = next(parent for parent in (settings.data_dir, *settings.data_dir.absolute().parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    yield Finding("ok" if free > LOW_DISK_BYTES else "warning", "disk", f"{format_bytes(free)} free at {folder}")
    kind = _file_system(folder)
    if kind in NETWORK_FILE_SYSTEMS:
        yield Finding("error", "file system", f"{folder} is on {kind}: SQLite's locks do not work there")


def _file_system(folder: Path) -> str:
    """The type of the file system that holds a folder, by the longest mount point that is above it."""
    import psutil

    above = [part for part in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(part.mountpoint)]
    return max(above, key=lambda part: len(part.mountpoint)).fstype if above else "unknown"


def _runner(settings: Settings, refresh: bool) -> Iterator[Finding]:
    """torch, the device and the bandwidths, asked of a runner: this process never imports torch."""
    try:
        runner = RunnerProcess(settings.runner_command, settings.data_dir)
    except OSError as error:
        yield Finding("error", "runner", f"{settings.runner_command[0]}: {error.strerror}")
        return
    runner.probe(refresh=refresh)
    runner.end()
    lines, found = ["it wrote nothing"], dict[str, Any]()
    try:
        for event in runner.events():
            if event and event["event"] in ("ready", "bandwidths"):
                found |= event
            elif event:
                lines.append(str(event.get("message")))
    finally:
        runner.stop(0)
    if "environment" not in found:
        yield Finding("error", "runner", f"{runner.death()}: {lines[-1]}")
        return
    yield from _device(found["environment"])
    if "bandwidths" in found:
        yield from _bandwidths(found["bandwidths"], found["environment"]["device_kind"])
    else:
        yield Finding("warning", "bandwidths", f"not measured: {lines[-1]}")


def _device(environment: dict[str, Any]) -> Iterator[Finding]:
    yield Finding("ok", "torch", f"{environment['torch']}, {environment['threads']} threads")
    device = f"{environment['device']}: {environment['device_name']}"
    if environment["device_kind"] == "cuda":
        yield Finding("ok", "device", f"{device}, {format_bytes(environment['device_memory_bytes'])}")
    elif has_nvidia():
        yield Finding("warning", "device", f"{device}. There is an NVIDIA card, but this torch cannot use it")
    else:
        yield Finding("warning", "device", f"{device}. No GPU: peaks are exact, times are this CPU's")


def _bandwidths(facts: dict[str, Any], device_kind: str) -> Iterator[Finding]:
    """What the tiers of an offloaded run move at."""
    what = " (on a CPU the device is memory too: copies, not PCIe)" if device_kind == "cpu" else ""

    def rate(path: str) -> str:
        return format_count(facts[f"{path}_bytes_per_second"], "B/s")

    if "link_error" in facts:
        yield Finding("warning", "host link", facts["link_error"])
    else:
        yield Finding("ok", "host link", f"{rate('host_to_device')} to the device, {rate('device_to_host')} back{what}")
    if "disk_error" in facts:
        yield Finding("warning", "NVMe tier", facts["disk_error"])
    else:
        yield Finding("ok", "NVMe tier", f"{facts['disk']}: reads {rate('disk_read')}, writes {rate('disk_write')}")
    if "cache_error" in facts:
        yield Finding("warning", "bandwidths", facts["cache_error"])


def _extras() -> Iterator[Finding]:
    for package, use in (("transformers", "any Hugging Face model"), ("pyarrow", "Parquet"), ("triton", "our kernel")):
        try:
            yield Finding("ok", package, version(package))
        except PackageNotFoundError:
            yield Finding("warning", package, f"not installed: no {use}")
