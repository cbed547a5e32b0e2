"""One process a rank. The launcher is the run's process: it watches the ranks and merges their results."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch

from engine.errors import RunError, UnsupportedError
from engine.result import RunResult, Timeline
from engine.spec import RunSpec

Progress = Callable[[str, int, int], None]
Message = dict[str, Any]


def measure_ranks(spec: RunSpec, device: str, progress: Progress) -> tuple[RunResult, Timeline | None]:
    """Measure `spec` on `world_size` processes of this machine.

    Raises UnsupportedError for more ranks or other offloading than it can run, RunError if a rank fails or dies; then
    none is left.
    """
    if device == "cuda" and spec.world_size > torch.cuda.device_count():
        raise UnsupportedError(
            "world_size", f"{spec.world_size} ranks need as many GPUs; this machine has {torch.cuda.device_count()}"
        )
    with tempfile.TemporaryDirectory(prefix="remat-ranks-") as folder:
        ranks = [_start(spec, device, rank, folder) for rank in range(spec.world_size)]
        try:
            messages = _collect(ranks, progress)
        finally:
            for rank in ranks:
                rank.kill()
                for stream in (rank.stdin, rank.stdout):
                    if stream is not None:
                        stream.close()
                rank.wait()
    results = [RunResult.model_validate(message["result"]) for message in messages]
    timelines = [message["timeline"] for message in messages]
    return _merge(results), Timeline.model_validate(timelines[0]) if timelines[0] else None


def _start(spec: RunSpec, device: str, rank: int, folder: str) -> subprocess.Popen[bytes]:
    """Start one rank. Its stdin stays open: it is the lifeline that the rank watches."""
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.sharding.rank"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    task = {
        "spec": spec.model_dump(mode="json"),
        "device": device,
        "rank": rank,
        "store": os.path.join(folder, "store"),
    }
    process.stdin.write(json.dumps(task).encode() + b"\n")
    process.stdin.flush()
    return process


def _collect(ranks: Sequence[subprocess.Popen[bytes]], progress: Progress) -> list[Message]:
    """Every rank's result, in order. The first failure or death ends it all."""
    results: dict[int, Message] = {}
    with selectors.DefaultSelector() as selector:
        for index, rank in enumerate(ranks):
            assert rank.stdout is not None
            selector.register(rank.stdout, selectors.EVENT_READ, index)
        while len(results) < len(ranks):
            for key, _ in selector.select():
                index = key.data
                line = ranks[index].stdout.readline()
                if not line:
                    if index not in results:
                        raise RunError(_death(index, ranks[index].wait()))
                    selector.unregister(key.fileobj)
                    continue
                message = json.loads(line)
                if "error" in message:
                    raise RunError(f"rank {index}: {message['error']}")
                if "result" in message:
                    results[index] = message
                    if message["result"]["outcome"] != "ok":
                        return [message]  # the others wait for this one
                elif index == 0:
                    progress(*message["progress"])
    return [results[index] for index in range(len(ranks))]


def _death(rank: int, status: int) -> str:
    if status < 0:
        return f"rank {rank} was killed by {signal.Signals(-status).name}; the other ranks were stopped"
    return f"rank {rank} ended with exit code {status} and no result; the other ranks were stopped"


def _merge(results: list[RunResult]) -> RunResult:
    """Rank 0's result with the mean loss, the largest peak, and each rank's own."""
    first = results[0]
    if first.outcome != "ok":
        return first
    largest = max(results, key=lambda result: result.memory.device_peak_bytes or 0)
    losses = [fmean(step) for step in zip(*(result.losses or [] for result in results), strict=True)]
    ranks = [
        {
            "rank": rank,
            "device_peak_bytes": result.memory.device_peak_bytes,
            "host_peak_bytes": result.memory.host_peak_bytes,
            "step_seconds": result.timing.step_seconds,
        }
        for rank, result in enumerate(results)
    ]
    return first.model_copy(update={"memory": largest.memory, "losses": losses, "ranks": ranks})
