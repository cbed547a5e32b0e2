"""Where a measurement ran: versions, device, threads. What a reader needs to trust or repeat a figure."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch


@cache
def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def environment(device: torch.device) -> dict[str, Any]:
    """Facts about this process and `device`; `device_kind` says what "device" memory means in the result."""
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "os": platform.platform(terse=True),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "device_kind": device.type,
    }
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        facts |= {
            "device_name": card.name,
            "device_memory_bytes": card.total_memory,
            "cuda": torch.version.cuda,
            "compute_capability": f"{card.major}.{card.minor}",
            "alloc_conf": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        }
    else:
        facts["device_name"] = _cpu_name()
    return facts
