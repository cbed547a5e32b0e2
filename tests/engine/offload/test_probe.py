"""Bandwidths are measured once and then read from their file; what cannot be measured or kept says why."""

import json
import time

import pytest
import torch

from engine.offload import probe
from engine.units import MIB

CPU = torch.device("cpu")
PATHS = ("device_to_host", "host_to_device", "disk_write", "disk_read")


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setenv("REMAT_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("REMAT_NVME_DIR", str(tmp_path / "nvme"))
    monkeypatch.setattr(probe, "COPY_BYTES", MIB)
    monkeypatch.setattr(probe, "DISK_BYTES", 4 * MIB)
    monkeypatch.setattr(probe, "REQUEST_BYTES", MIB)
    return tmp_path


def test_measured_once_and_again_when_asked(small):
    first = probe.bandwidths(CPU)
    assert all(first[f"{path}_bytes_per_second"] > 0 for path in PATHS)
    assert first["disk"].startswith(f"{small / 'nvme'} (")
    assert list((small / "nvme").iterdir()) == []
    kept = json.loads(probe.cache_path().read_text())
    kept["link cpu"]["host_to_device_bytes_per_second"] = 1
    probe.cache_path().write_text(json.dumps(kept))
    assert probe.bandwidths(CPU)["host_to_device_bytes_per_second"] == 1
    assert probe.bandwidths(CPU, refresh=True)["host_to_device_bytes_per_second"] > 1


def test_another_folder_is_another_disk(small, monkeypatch):
    probe.bandwidths(CPU)
    monkeypatch.setenv("REMAT_NVME_DIR", str(small / "second"))
    assert probe.bandwidths(CPU)["disk"].startswith(f"{small / 'second'} (")
    assert len(json.loads(probe.cache_path().read_text())) == 3


def test_without_a_disk_the_reason_is_given_and_not_kept(small, monkeypatch):
    (small / "file").write_text("")
    monkeypatch.setenv("REMAT_NVME_DIR", str(small / "file"))
    facts = probe.bandwidths(CPU)
    assert "disk_read_bytes_per_second" not in facts
    assert "that is not a directory" in facts["disk_error"] or "File exists" in facts["disk_error"]
    assert list(json.loads(probe.cache_path().read_text())) == ["link cpu"]


def test_memory_is_no_disk(small, monkeypatch):
    monkeypatch.setattr("engine.offload.nvme.mount_of", lambda _: ("tmpfs", "tmpfs"))
    assert "tmpfs is memory, not a disk" in probe.bandwidths(CPU)["disk_error"]


def test_a_folder_that_cannot_be_written_is_said(small):
    (small / "data").write_text("")
    facts = probe.bandwidths(CPU)
    assert facts["host_to_device_bytes_per_second"] > 0
    assert "cannot be written" in facts["cache_error"]


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_file_is_replaced(small, text):
    cache = probe.cache_path()
    cache.parent.mkdir()
    cache.write_text(text)
    assert "cache_error" not in probe.bandwidths(CPU)
    assert len(json.loads(cache.read_text())) == 2


def test_a_slow_disk_takes_no_longer(small, monkeypatch):
    monkeypatch.setattr(probe, "PASS_SECONDS", 0.05)
    moved = probe._through(lambda offset, memory: time.sleep(0.03), memoryview(bytearray(MIB)), 4 * MIB)
    assert moved == 2 * MIB
