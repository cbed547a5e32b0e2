"""Offloading on a GPU: how much of its transfers a step hides, what it costs, and torchao's CPUOffloadOptimizer.

    python -m benchmarks.offload_cuda

A model of a billion parameters, 8192 tokens a step, bf16 weights with fp32 states, per-layer checkpointing:

1. Nothing offloaded; the optimizer in host memory, serial and overlapped. What is hidden is the share of the serial
   step's transfers (its exposed seconds) that the overlapped step does not wait for.
2. Activations in host memory on top of per-layer checkpointing.
3. The same model under torchao's CPUOffloadOptimizer, where torchao is installed.

Each runs in a process of its own, steps are timed as every measured run's. Needs a CUDA device, and says so. Writes
benchmarks/results/offload_cuda.{json,md}; exits 1 if less than 60 % is hidden or activations cost 5 % or more.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.environment import environment
from engine.measure import measure
from engine.offload.probe import bandwidths
from engine.optimizers import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY
from engine.spec import RunSpec
from engine.training import build
from engine.units import format_bytes, format_count, format_seconds

CUDA = torch.device("cuda")
RESULTS = Path(__file__).parent / "results"
SPEC = {
    "model": "gpt:20,2048,16,50304",  # 1.1 billion parameters
    "micro_batch": 4,
    "seq": 2048,
    "precision": "bf16-12",
    "checkpointing": "per-layer",
    "device": "cuda",
    "steps": 10,
    "warmup": 3,
}
RUNS: dict[str, dict[str, Any]] = {
    "no offloading": {},
    "optimizer in host memory, serial": {"offload_optimizer": "cpu", "offload_overlap": False},
    "optimizer in host memory, overlapped": {"offload_optimizer": "cpu"},
    "activations in host memory, overlapped": {"offload_activations": "cpu"},
}
LEAST_HIDDEN, MOST_COST = 0.60, 0.05


def measured(fields: dict[str, Any]) -> dict[str, Any]:
    """The step's seconds and bytes, as any measured run reports them."""
    result, _ = measure(RunSpec(**{**SPEC, **fields}))
    if result.outcome != "ok":
        return {"missing": f"{result.outcome}: {result.error}"}
    return {
        "step_seconds": result.timing.step_seconds,
        "exposed_seconds": result.timing.phases_seconds.exposed_transfer,
        "device_peak_bytes": result.memory.device_peak_bytes,
        "host_peak_bytes": result.memory.host_peak_bytes,
    }


def torchao(_fields: dict[str, Any]) -> dict[str, Any]:
    """Our model and step under torchao's optimizer, which keeps weights and states in pinned host memory."""
    try:
        from torchao.optim import CPUOffloadOptimizer
    except ImportError as error:
        return {"missing": f"not installed ({error}): pip install torchao"}
    spec = RunSpec(**SPEC)
    training = build(spec, CUDA)
    settings = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPSILON, "weight_decay": WEIGHT_DECAY, "fused": True}
    optimizer = CPUOffloadOptimizer(training.model.parameters(), torch.optim.AdamW, **settings)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    training.optimizer.slots.clear()
    training.optimizer.step = step
    seconds = []
    for index in range(spec.warmup + spec.steps):
        if index == spec.warmup:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        training.step(index)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "step_seconds": statistics.median(seconds[spec.warmup :]),
        "exposed_seconds": None,
        "device_peak_bytes": torch.cuda.max_memory_allocated(),
        "host_peak_bytes": None,
    }


def apart(call: Callable[[dict[str, Any]], dict[str, Any]], fields: dict[str, Any]) -> dict[str, Any]:
    """Run in a fresh process: no run inherits another's allocator or pinned memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(call, (fields,))


def verdict(rows: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """Shares that the claims are about; None where a run is missing."""
    plain, serial, overlapped, activations = (rows[name] for name in RUNS)
    hidden = cost = None
    if "missing" not in serial and "missing" not in overlapped:
        hidden = 1 - overlapped["exposed_seconds"] / serial["exposed_seconds"]
    if "missing" not in plain and "missing" not in activations:
        cost = activations["step_seconds"] / plain["step_seconds"] - 1
    return {"hidden_share": hidden, "activation_cost_share": cost}


def report(results: dict[str, Any]) -> str:
    facts, links = results["environment"], results["bandwidths"]
    lines = [
        "# Offloading on a GPU",
        "",
        f"`{results['command']}` on {facts['device_name']}, {facts['cpu']}, torch {facts['torch']}. "
        f"{SPEC['model']}, {SPEC['micro_batch'] * SPEC['seq']} tokens a step, {SPEC['precision']}, per-layer "
        f"checkpointing. Pinned copies: {format_count(links.get('device_to_host_bytes_per_second'), 'B/s')} down, "
        f"{format_count(links.get('host_to_device_bytes_per_second'), 'B/s')} up.",
        "",
        "| | step (median) | exposed transfer | device peak | host peak |",
        "|---|---|---|---|---|",
    ]
    for name, row in results["runs"].items():
        if "missing" in row:
            lines.append(f"| {name} | {row['missing']} | | | |")
            continue
        lines.append(
            f"| {name} | {format_seconds(row['step_seconds'])} | {format_seconds(row['exposed_seconds'])} | "
            f"{format_bytes(row['device_peak_bytes'])} | {format_bytes(row['host_peak_bytes'])} |"
        )
    hidden, cost = results["verdict"]["hidden_share"], results["verdict"]["activation_cost_share"]
    lines += [
        "",
        f"Hidden of the optimizer's transfers: {'unknown' if hidden is None else f'{hidden:.0%}'}; "
        f"activation offload costs {'unknown' if cost is None else f'{cost:.1%}'}.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    if not torch.cuda.is_available():
        print(f"needs a CUDA device; torch {torch.__version__} sees none here: nothing was measured", file=sys.stderr)
        raise SystemExit(2)
    rows = {name: apart(measured, fields) for name, fields in RUNS.items()}
    judged = verdict(rows)
    results = {
        "command": "python -m benchmarks.offload_cuda",
        "environment": environment(CUDA),
        "bandwidths": bandwidths(CUDA),
        "spec": SPEC,
        "runs": rows | {"torchao's CPUOffloadOptimizer": apart(torchao, {})},
        "verdict": judged,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "offload_cuda.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "offload_cuda.md").write_text(report(results))
    print(report(results))
    hidden, cost = judged["hidden_share"], judged["activation_cost_share"]
    sys.exit(hidden is None or cost is None or hidden < LEAST_HIDDEN or cost >= MOST_COST)


if __name__ == "__main__":
    main()
