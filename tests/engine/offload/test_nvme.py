"""Files of the NVMe tier: what is written comes back; every fault is one clear sentence and leaves nothing behind."""

import errno
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.errors import StorageError
from engine.offload import nvme
from engine.offload.nvme import NvmeFile, file_system, nvme_directory, prepare_directory, sweep
from engine.offload.tiers import PAGE_BYTES, Ledger


def buffer(pages: int = 1, fill: bytes = b"\0") -> memoryview:
    memory = mmap.mmap(-1, pages * PAGE_BYTES)
    memory.write(fill * (pages * PAGE_BYTES))
    return memoryview(memory)


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
def file(tmp_path, ledger):
    made = NvmeFile(tmp_path, 4 * PAGE_BYTES, ledger)
    yield made
    made.close()


def test_what_is_written_comes_back_and_is_counted(file, ledger):
    file.write(PAGE_BYTES, buffer(2, b"x"))
    back = buffer(4)
    file.read(0, back)
    assert bytes(back) == b"\0" * PAGE_BYTES + b"x" * (2 * PAGE_BYTES) + b"\0" * PAGE_BYTES
    assert ledger.moved == {"written": 2 * PAGE_BYTES, "read": 4 * PAGE_BYTES}
    assert ledger.nvme.now_bytes == 4 * PAGE_BYTES


def test_the_file_is_not_sparse_and_goes_when_closed(file, ledger):
    assert os.stat(file.path).st_blocks * 512 >= 4 * PAGE_BYTES
    file.close()
    file.close()
    assert not file.path.exists()
    assert (ledger.nvme.now_bytes, ledger.nvme.peak_bytes) == (0, 4 * PAGE_BYTES)


def test_truncated_under_us(file):
    os.truncate(file.path, PAGE_BYTES)
    for transfer in (file.read, file.write):
        with pytest.raises(StorageError, match=r"truncated to 4\.00 KiB of 16\.00 KiB"):
            transfer(0, buffer())


def test_directory_removed_under_us(tmp_path, ledger):
    folder = tmp_path / "gone"
    folder.mkdir()
    file = NvmeFile(folder, PAGE_BYTES, ledger)
    file.path.unlink()
    folder.rmdir()
    with pytest.raises(StorageError, match="removed during the run"):
        file.write(0, buffer())
    file.close()


def test_no_room_for_the_file(tmp_path, ledger):
    free = os.statvfs(tmp_path)
    with pytest.raises(StorageError, match=r"the disk is full .* needed, .* free|larger than this process may write"):
        NvmeFile(tmp_path, free.f_blocks * free.f_frsize * 2, ledger)
    assert list(tmp_path.iterdir()) == []


def test_a_size_limit_of_the_process(tmp_path, ledger):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE_BYTES, before[1]))
    try:
        with pytest.raises(StorageError, match="larger than this process may write"):
            NvmeFile(tmp_path, 4 * PAGE_BYTES, ledger)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "the disk is full"), (errno.EIO, "the disk reported an I/O error")]
)
def test_a_write_that_fails_later(file, monkeypatch, number, words):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(StorageError, match=words):
        file.write(0, buffer())


def test_memory_is_refused(monkeypatch):
    if file_system(Path("/dev/shm")) != "tmpfs":
        monkeypatch.setattr(nvme, "file_system", lambda _: "tmpfs")
    with pytest.raises(StorageError, match="tmpfs is memory, not a disk; set REMAT_NVME_DIR"):
        prepare_directory(Path("/dev/shm"))


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="that is not a directory"):
        prepare_directory(tmp_path / "file" / "inside")


def test_a_read_only_directory(tmp_path, ledger, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match="the file system is read-only"):
        NvmeFile(tmp_path, PAGE_BYTES, ledger)


def test_the_directory_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("REMAT_NVME_DIR", str(tmp_path))
    assert nvme_directory() == tmp_path
    monkeypatch.delenv("REMAT_NVME_DIR")
    assert nvme_directory().name == f"remat-nvme-{os.getuid()}"


def test_sweep_spares_the_living_and_takes_what_a_killed_process_left(tmp_path, file):
    code = (
        "import sys, mmap; from pathlib import Path; from engine.offload.nvme import NvmeFile;"
        "from engine.offload.tiers import Ledger;"
        "file = NvmeFile(Path(sys.argv[1]), 1 << 26, Ledger()); view = memoryview(mmap.mmap(-1, 1 << 26));"
        "print('open', flush=True)\n"
        "while True: file.write(0, view)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    assert sweep(tmp_path) == 0
    assert len(list(tmp_path.iterdir())) == 2
    time.sleep(0.05)
    child.send_signal(signal.SIGKILL)  # in the middle of a write
    child.wait()
    child.stdout.close()
    prepare_directory(tmp_path)
    assert list(tmp_path.iterdir()) == [file.path]
