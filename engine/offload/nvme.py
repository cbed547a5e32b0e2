"""Files of the NVMe tier: preallocated, read and written past the page cache (O_DIRECT), gone when the run ends.

A file belongs to the process that holds its lock. The kernel drops the lock with the process, however it dies, so
whoever starts next can tell a dead owner's file from a live one's, in any container, and sweep it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from pathlib import Path
from uuid import uuid4

from engine.errors import StorageError
from engine.offload.tiers import Ledger, page_aligned
from engine.units import format_bytes

DIRECTORY_VARIABLE = "REMAT_NVME_DIR"
SUFFIX = ".remat-nvme"
NOT_A_DISK = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
MAX_REQUEST_BYTES = 1 << 30  # the kernel takes at most 2 GiB - 4 KiB in one request

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than this process may write",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
    errno.ENOENT: "the directory is gone",
    errno.ENOTDIR: "that is not a directory",
    errno.EINVAL: "the file system does not support direct I/O",
    errno.EIO: "the disk reported an I/O error",
}


def nvme_directory() -> Path:
    """Where files go: $REMAT_NVME_DIR, else a folder of this user under the first temp folder on a real disk."""
    if chosen := os.environ.get(DIRECTORY_VARIABLE):
        return Path(chosen)
    candidates = [Path("/var/tmp"), Path(tempfile.gettempdir())]
    on_disk = [path for path in candidates if path.is_dir() and file_system(path) not in NOT_A_DISK]
    return (on_disk or candidates)[0] / f"remat-nvme-{os.getuid()}"


def mount_of(path: Path) -> tuple[str, str]:
    """(type, source) of the file system that holds `path`, as the kernel's mount table names them; "unknown" without
    one."""
    target = path.resolve()
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown", "unknown"
    best, kind, source = -1, "unknown", "unknown"
    for line in lines:
        fields, _, rest = line.partition(" - ")
        point = Path(fields.split()[4].replace("\\040", " "))
        if target.is_relative_to(point) and len(point.parts) >= best:
            best, (kind, source) = len(point.parts), rest.split()[:2]
    return kind, source


def file_system(path: Path) -> str:
    """Type of the file system that holds `path`."""
    return mount_of(path)[0]


def prepare_directory(directory: Path) -> list[str]:
    """Make `directory` fit for the tier and sweep what dead processes left. Returns warnings for the result.

    Raises StorageError if it cannot be made or is no disk.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(_sentence(directory, error)) from error
    kind = file_system(directory)
    if kind in NOT_A_DISK:
        raise StorageError(
            f"the NVMe tier in {directory}: {kind} is memory, not a disk; set {DIRECTORY_VARIABLE} to a disk's folder"
        )
    sweep(directory)
    if kind == "overlay":
        return [f"{directory} is on an overlay file system: set {DIRECTORY_VARIABLE} to a mounted disk for its speed"]
    return []


def sweep(directory: Path | None = None) -> int:
    """Remove the files whose owner is dead; how many there were."""
    swept = 0
    for path in (directory or nvme_directory()).glob(f"*{SUFFIX}"):
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # somebody else's, or just swept
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            swept += 1
        except OSError:
            pass  # its owner lives
        finally:
            os.close(handle)
    return swept


class NvmeFile:
    """One preallocated file. Offsets and lengths are whole pages. Safe to use from any thread."""

    def __init__(self, directory: Path, count: int, ledger: Ledger) -> None:
        """Raises StorageError if the file cannot be created or the disk has no room for `count` bytes."""
        self.ledger = ledger
        self.path = directory / f"{os.getpid()}-{uuid4().hex[:8]}{SUFFIX}"
        self.count = page_aligned(count)
        self._handle = -1
        try:
            self._handle = _create(self.path)
            os.posix_fallocate(self._handle, 0, self.count)
        except OSError as error:
            self._remove()
            raise StorageError(_sentence(directory, error, self.count)) from error
        ledger.hold(ledger.nvme, self.count)

    def read(self, offset: int, target: memoryview) -> None:
        """Fill `target` from `offset`. Raises StorageError, also when the file was cut short."""
        self._check(offset + len(target))
        done = 0
        while done < len(target):
            part = target[done : done + MAX_REQUEST_BYTES]
            try:
                got = os.preadv(self._handle, [part], offset + done)
            except OSError as error:
                raise StorageError(_sentence(self.path, error)) from error
            if got == 0:
                raise StorageError(f"the NVMe tier in {self.path}: the file ends at {offset + done}, it was truncated")
            done += got
        self.ledger.move("read", done)

    def write(self, offset: int, source: memoryview) -> None:
        """Write `source` at `offset`. Raises StorageError."""
        self._check(offset + len(source))
        done = 0
        while done < len(source):
            try:
                done += os.pwrite(self._handle, source[done : done + MAX_REQUEST_BYTES], offset + done)
            except OSError as error:
                raise StorageError(_sentence(self.path, error)) from error
        self.ledger.move("written", done)

    def _check(self, end: int) -> None:
        """A file cut short would grow back by a write, with zeros where states were: ask before each transfer."""
        try:
            facts = os.fstat(self._handle)
        except OSError as error:
            raise StorageError(_sentence(self.path, error)) from error
        if facts.st_nlink == 0:
            raise StorageError(f"the NVMe tier in {self.path}: the file or its directory was removed during the run")
        if facts.st_size < max(end, self.count):
            raise StorageError(
                f"the NVMe tier in {self.path}: the file was truncated to {format_bytes(facts.st_size)} of "
                f"{format_bytes(self.count)} during the run"
            )

    def close(self) -> None:
        """Remove the file. Safe to call twice."""
        if self._handle >= 0:
            self._remove()
            self.ledger.hold(self.ledger.nvme, -self.count)

    def _remove(self) -> None:
        if self._handle >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = -1


def _create(path: Path) -> int:
    """A new locked file. A sweeper that came between creation and lock has removed it: then once more."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle
        os.close(handle)


def _sentence(path: Path, error: OSError, count: int = 0) -> str:
    reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    room = ""
    if count and error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = os.statvfs(path)
        room = f" ({format_bytes(count)} needed, {format_bytes(free.f_bavail * free.f_frsize)} free)"
    return f"the NVMe tier in {path}: {reason}{room}"
