"""Bandwidths of this machine: host to device and back, and the NVMe tier's disk. Measured once, then read from a file.

Copies of 64 MiB between device and (on CUDA, page-locked) host memory; 512 MiB written to and read from the tier's
folder past the page cache, in requests of 16 MiB. The best of three repetitions: what the path can do.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.errors import StorageError
from engine.offload.link import Link
from engine.offload.nvme import NvmeFile, file_system, nvme_directory, prepare_directory
from engine.offload.tiers import Arena, Ledger
from engine.units import MIB

REPETITIONS = 3
COPY_BYTES = 64 * MIB
DISK_BYTES = 512 * MIB
REQUEST_BYTES = 16 * MIB


def bandwidths(device: torch.device, *, refresh: bool = False) -> dict[str, Any]:
    """Bytes per second by path, for `environment`: `down`, `up`, `disk_write`, `disk_read`; what the disk is.

    Without a usable disk its two are None and `disk_error` says why.
    """
    cache = _cache_path()
    known: dict[str, Any] = json.loads(cache.read_text()) if cache.is_file() and not refresh else {}
    directory = nvme_directory()
    link_key, disk_key = f"link {_device_name(device)}", f"disk {directory}"
    missing = [key for key in (link_key, disk_key) if key not in known]
    if link_key in missing:
        known[link_key] = _link(device)
    if disk_key in missing:
        known[disk_key] = _disk(directory)
    if missing:
        _store(cache, known)
    return {**known[link_key], **known[disk_key]}


def _cache_path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "remat" / "bandwidths.json"


def _store(cache: Path, known: dict[str, Any]) -> None:
    """Replace the file in one go; a folder that cannot be written only costs the next process a measurement."""
    draft = cache.with_suffix(f".{os.getpid()}")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(known, indent=1))
        draft.replace(cache)
    except OSError:
        return


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _best(count: int, call: Callable[[], None]) -> int:
    seconds = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return int(count / min(seconds))


def _link(device: torch.device) -> dict[str, int]:
    ledger = Ledger()
    link, arena = Link(device, ledger, overlap=False), Arena(ledger, device)
    block, tensor = arena.take(COPY_BYTES), torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def down() -> None:
        link.down(tensor, block).wait()
        finish()

    def up() -> None:
        link.up(block, tensor).wait()
        finish()

    down()
    speeds = {
        "down_bytes_per_second": _best(COPY_BYTES, down),
        "up_bytes_per_second": _best(COPY_BYTES, up),
    }
    link.close()
    return speeds


def _disk(directory: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"disk_write_bytes_per_second": None, "disk_read_bytes_per_second": None}
    facts["disk"] = f"{directory} ({file_system(directory)})"
    ledger = Ledger()
    block = Arena(ledger, torch.device("cpu")).take(REQUEST_BYTES)
    assert block.tensor is not None
    assert block.memory is not None
    memory = block.memory
    block.tensor.random_()  # a disk that compresses must not look fast
    try:
        prepare_directory(directory)
        file = NvmeFile(directory, DISK_BYTES, ledger)
        try:
            facts["disk_write_bytes_per_second"] = _best(DISK_BYTES, partial(_through, file.write, memory))
            facts["disk_read_bytes_per_second"] = _best(DISK_BYTES, partial(_through, file.read, memory))
        finally:
            file.close()
    except StorageError as error:
        facts["disk_error"] = str(error)
    return facts


def _through(transfer: Callable[[int, memoryview], None], memory: memoryview) -> None:
    for offset in range(0, DISK_BYTES, REQUEST_BYTES):
        transfer(offset, memory)
