"""Bandwidths of this machine: host to device and back, and the NVMe tier's disk. Measured once, then read from a file.

Copies of 64 MiB between device and (on CUDA, page-locked) host memory; up to 256 MiB written to and read from the
tier's folder past the page cache, in requests of 16 MiB. The best of three passes: what the path can do. A pass ends
after 0.3 s, so that a slow disk takes two seconds and not a minute.
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

from engine.errors import RunError, StorageError
from engine.offload.link import Link
from engine.offload.nvme import NvmeFile, mount_of, nvme_directory, prepare_directory
from engine.offload.tiers import Arena, Ledger
from engine.places import data_directory
from engine.units import MIB

PASSES = 3
PASS_SECONDS = 0.3
COPY_BYTES = 64 * MIB
DISK_BYTES = 256 * MIB
REQUEST_BYTES = 16 * MIB

Facts = dict[str, Any]


def bandwidths(device: torch.device, *, refresh: bool = False) -> Facts:
    """For `environment`: bytes per second by path (`device_to_host`, `host_to_device`, `disk_write`, `disk_read`), and
    `disk`, what the disk is.

    What cannot be measured is left out: `link_error` or `disk_error` says why, `cache_error` why nothing was kept.
    """
    cache, directory = cache_path(), nvme_directory()
    known: dict[str, Facts] = {} if refresh else _load(cache)
    disk = f"{directory} ({' on '.join(mount_of(directory))})"
    link_key, disk_key = f"link {_device_name(device)}", f"disk {disk}"
    measured: dict[str, Facts] = {}
    if link_key not in known:
        measured[link_key] = _link(device)
    if disk_key not in known:
        measured[disk_key] = {"disk": disk} | _disk(directory)
    found = known | measured
    kept = {key: facts for key, facts in measured.items() if not {"link_error", "disk_error"} & facts.keys()}
    return {**found[link_key], **found[disk_key], **(_store(cache, _load(cache) | kept) if kept else {})}


def cache_path() -> Path:
    """Where measured bandwidths are kept."""
    return data_directory() / "bandwidths.json"


def _load(cache: Path) -> dict[str, Facts]:
    """What is known; nothing, where the file is missing, damaged or out of reach."""
    try:
        known = json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _store(cache: Path, known: dict[str, Facts]) -> Facts:
    """Replace the file in one go. A folder that cannot be written only costs the next process a measurement."""
    draft = cache.with_suffix(f".{os.getpid()}")
    try:
        cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft.write_text(json.dumps(known, indent=1) + "\n")
        draft.replace(cache)
    except OSError as error:
        return {"cache_error": f"{cache} cannot be written ({error.strerror}): measured again next time"}
    return {}


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu"
    card = torch.cuda.get_device_properties(device)
    return f"{card.name} {card.uuid}"


def _link(device: torch.device) -> Facts:
    try:
        return _link_speeds(device)
    except (RunError, RuntimeError) as error:  # no memory left beside a run, on the device or on the host
        return {"link_error": " ".join(str(error).split())[:200]}
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _link_speeds(device: torch.device) -> Facts:
    ledger = Ledger()
    link, arena = Link(device, ledger, overlap=False), Arena(ledger, device)
    try:
        block, tensor = arena.take(COPY_BYTES), torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
        paths = {"device_to_host": partial(link.down, tensor, block), "host_to_device": partial(link.up, block, tensor)}
        link.down(tensor, block).wait()  # the first copy also maps the memory
        return {f"{name}_bytes_per_second": _best(partial(_copied, copy, device)) for name, copy in paths.items()}
    finally:
        link.close()


def _copied(copy: Callable[[], Any], device: torch.device) -> int:
    copy().wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return COPY_BYTES


def _disk(directory: Path) -> Facts:
    ledger = Ledger()
    block = Arena(ledger, torch.device("cpu")).take(REQUEST_BYTES)
    assert block.tensor is not None
    assert block.memory is not None
    block.tensor.random_()  # a disk that compresses must not look fast
    try:
        prepare_directory(directory)
        file = NvmeFile(directory, _room(directory), ledger)
        try:
            paths = {"disk_write": file.write, "disk_read": file.read}
            return {
                f"{name}_bytes_per_second": _best(partial(_through, transfer, block.memory, file.count))
                for name, transfer in paths.items()
            }
        finally:
            file.close()
    except StorageError as error:
        return {"disk_error": str(error)}


def _room(directory: Path) -> int:
    """Bytes to try the disk with: at most a quarter of what is free, but one request."""
    disk = os.statvfs(directory)
    quarter = disk.f_bavail * disk.f_frsize // 4
    return max(REQUEST_BYTES, min(DISK_BYTES, quarter // REQUEST_BYTES * REQUEST_BYTES))


def _through(transfer: Callable[[int, memoryview], None], memory: memoryview, end: int) -> int:
    """Bytes moved until the file's `end`, or until the time for one pass is over."""
    deadline, done = time.perf_counter() + PASS_SECONDS, 0
    while done < end and time.perf_counter() < deadline:
        transfer(done, memory)
        done += REQUEST_BYTES
    return done


def _best(move: Callable[[], int]) -> int:
    """Bytes per second of the fastest of several calls, which say how many bytes they moved."""
    speeds = []
    for _ in range(PASSES):
        start = time.perf_counter()
        count = move()
        speeds.append(count / (time.perf_counter() - start))
    return int(max(speeds))
