"""The measured peak against an independent count of the profiler's allocator events.

    python -m benchmarks.allocator_events

For each configuration one process runs Remat's measurement, and another steps the same model under a bare profiler,
adds up the `[memory]` events and the bytes alive at the start, and takes the maximum. The two share the model and
nothing of the accounting.
"""

from __future__ import annotations

import json
import subprocess
import sys

import torch
from torch.profiler import ProfilerActivity, profile

from engine.measure import measure
from engine.spec import RunSpec, expand
from engine.training import build
from engine.units import format_bytes

BASE = {"micro_batch": 4, "seq": 512, "precision": "fp32", "device": "cpu", "steps": 1, "warmup": 1}
GRID = {
    "model": ["gpt-tiny", "llama-tiny"],
    "attention": ["standard", "flash"],
    "checkpointing": ["none", "per-layer"],
}


def independent_peak_bytes(spec: RunSpec) -> int:
    """Bytes alive before a steady step plus the running maximum of the profiler's allocations and frees."""
    training = build(spec, torch.device("cpu"))
    training.step(0)
    held = [*training.model.parameters(), *training.model.buffers(), *training.optimizer.tensors()]
    alive = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        training.step(1)
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = current = alive
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


def main() -> None:
    if len(sys.argv) == 3:
        spec = RunSpec.model_validate_json(sys.argv[2])
        if sys.argv[1] == "independent":
            print(independent_peak_bytes(spec))
        else:
            print(measure(spec)[0].memory.device_peak_bytes)
        return
    worst = 0.0
    for spec in expand(BASE, GRID):
        measured, independent = (_in_a_process(how, spec) for how in ("measured", "independent"))
        error = measured / independent - 1
        worst = max(worst, abs(error))
        name = f"{spec.model}, {spec.attention}, {spec.checkpointing}"
        print(f"{name:<32} {format_bytes(measured):>12} {format_bytes(independent):>12} {error:+.4%}")
    print(f"worst difference {worst:.4%}")


def _in_a_process(how: str, spec: RunSpec) -> int:
    command = [sys.executable, "-m", "benchmarks.allocator_events", how, spec.model_dump_json()]
    return int(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


if __name__ == "__main__":
    main()
