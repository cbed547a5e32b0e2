"""The process of one rank: `python -m engine.sharding.rank`, its task on stdin, its events and result on stdout.

Standard input is the lifeline: when the launcher is gone it closes, and this process ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from datetime import timedelta
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "6")
if sys.platform == "linux":  # all ranks are on this machine; the host's name need not resolve
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist

from engine.errors import RematError
from engine.heap import keep_freed_memory
from engine.measure import measure_here
from engine.spec import RunSpec

PATIENCE = timedelta(minutes=10)  # how long a collective waits for the slowest rank


def main() -> None:
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library's stray print must not look like an event
    keep_freed_memory()
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_die_with_launcher, daemon=True).start()

    def emit(message: dict[str, Any]) -> None:
        events.write(json.dumps(message) + "\n")
        events.flush()

    try:
        emit(_run(task, emit))
    except RematError as error:
        emit({"error": str(error)})
    except Exception as error:  # the launcher turns it into the run's failure
        traceback.print_exc()
        emit({"error": f"{type(error).__name__}: {error}"})
    os._exit(0)


def _die_with_launcher() -> None:
    sys.stdin.read()
    os._exit(1)


def _run(task: dict[str, Any], emit: Any) -> dict[str, Any]:
    spec, rank = RunSpec.model_validate(task["spec"]), task["rank"]
    device = torch.device(task["device"])
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // spec.world_size))
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{task['store']}", rank=rank, world_size=spec.world_size, timeout=PATIENCE)
    result, timeline = measure_here(spec, device, lambda phase, step, steps: emit({"progress": [phase, step, steps]}))
    return {
        "result": result.model_dump(mode="json"),
        "timeline": timeline.model_dump(mode="json") if timeline else None,
    }


if __name__ == "__main__":
    main()
