"""Bandwidths are measured once and then read from their file."""

import pytest
import torch

from engine.offload import probe
from engine.units import MIB

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("REMAT_NVME_DIR", str(tmp_path / "nvme"))
    monkeypatch.setattr(probe, "COPY_BYTES", MIB)
    monkeypatch.setattr(probe, "DISK_BYTES", 4 * MIB)
    monkeypatch.setattr(probe, "REQUEST_BYTES", MIB)
    return tmp_path


def test_measured_once(small):
    first = probe.bandwidths(CPU)
    assert all(first[f"{path}_bytes_per_second"] > 0 for path in ("down", "up", "disk_write", "disk_read"))
    assert str(small / "nvme") in first["disk"]
    assert probe.bandwidths(CPU) == first
    assert list((small / "nvme").iterdir()) == []


def test_without_a_disk_the_reason_is_given(small, monkeypatch):
    (small / "file").write_text("")
    monkeypatch.setenv("REMAT_NVME_DIR", str(small / "file"))
    facts = probe.bandwidths(CPU)
    assert facts["disk_read_bytes_per_second"] is None
    assert "that is not a directory" in facts["disk_error"] or "File exists" in facts["disk_error"]
