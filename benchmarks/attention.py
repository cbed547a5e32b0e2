"""Attention kernels side by side: memory and time of forward + backward against sequence length.

    python -m benchmarks.attention [--seconds 60] [--lengths 512,1024,2048,4096]

Repetitions are interleaved (one of each kernel in turn), so that a busy machine slows them alike; the median counts.
Memory comes from the allocator's events, in a pass of its own. On a CPU the longest length is timed once more with
freed memory kept (`engine.heap`), as Remat's runs have it: fresh pages slow the kernel that fills most memory. On a
machine with a CUDA GPU the Triton kernels run too, causal, bf16, heads of 64 and 128. Writes
benchmarks/results/attention.md and attention.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from engine.attention import Kernel, select_kernel
from engine.environment import environment
from engine.heap import keep_freed_memory
from engine.spec import Attention
from engine.units import format_bytes, format_seconds

RESULTS = Path(__file__).parent / "results"
HEADS, THREADS = 8, 2
CPU_KERNELS: tuple[Attention, ...] = ("standard", "flash", "tiled")
CUDA_KERNELS: tuple[Attention, ...] = ("standard", "flash", "tiled", "triton")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="timing budget for each length")
    parser.add_argument("--lengths", default=None, help="comma-separated; default 512…4096, on CUDA 2k…16k")
    options = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    lengths = [int(n) for n in options.lengths.split(",")] if options.lengths else default_lengths(cuda)
    names = CUDA_KERNELS if cuda else CPU_KERNELS
    rows = [
        row
        for head_dim in ((64, 128) if cuda else (64,))
        for seq in lengths
        for row in compare(names, seq, head_dim, device, dtype, options.seconds)
    ]
    kept = []
    if not cuda and keep_freed_memory():
        kept = compare(names, lengths[-1], 64, device, dtype, options.seconds)
    write(rows, kept, device, dtype)


def default_lengths(cuda: bool) -> list[int]:
    return [2048, 4096, 8192, 16384] if cuda else [512, 1024, 2048, 4096]


def compare(
    names: Sequence[Attention], seq: int, head_dim: int, device: torch.device, dtype: torch.dtype, seconds: float
) -> list[dict[str, Any]]:
    """One row a kernel: name, S, D, peak bytes, and the seconds of every repetition."""
    kernels = {name: select_kernel(name, device=device, dtype=dtype, head_dim=head_dim, dropout=0.0) for name in names}
    inputs = [
        torch.randn(1, seq, HEADS, head_dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for _ in range(3)
    ]
    upstream = torch.randn_like(inputs[0])
    peaks = {name: peak_bytes(kernel, inputs, upstream) for name, kernel in kernels.items()}
    times: dict[str, list[float]] = {name: [] for name in names}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[names[-1]]) < 5:
        for name, kernel in kernels.items():
            times[name].append(step_seconds(kernel, inputs, upstream))
    print(f"S={seq} D={head_dim}: {len(times[names[0]])} repetitions", file=sys.stderr)
    return [
        {
            "kernel": name,
            "runs": kernels[name].name,
            "seq": seq,
            "head_dim": head_dim,
            "peak_bytes": peaks[name],
            "median_seconds": statistics.median(times[name]),
            "fastest_seconds": min(times[name]),
            "seconds": times[name],
        }
        for name in names
    ]


def step_seconds(kernel: Kernel, inputs: list[Tensor], upstream: Tensor) -> float:
    synchronize(upstream.device)
    start = time.perf_counter()
    torch.autograd.grad(kernel(*inputs), inputs, upstream)
    synchronize(upstream.device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(kernel: Kernel, inputs: list[Tensor], upstream: Tensor) -> int:
    """The most bytes alive above the inputs during forward and backward."""
    if upstream.is_cuda:
        torch.autograd.grad(kernel(*inputs), inputs, upstream)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(kernel(*inputs), inputs, upstream)
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        torch.autograd.grad(kernel(*inputs), inputs, upstream)
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    events = [event for event in results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def slope(rows: list[dict[str, Any]], field: str) -> float | None:
    """Least-squares slope of `field` against S on log-log axes; None for a single length."""
    if len(rows) < 2:
        return None
    x, y = [math.log(row["seq"]) for row in rows], [math.log(row[field]) for row in rows]
    centre = statistics.fmean(x)
    return sum((a - centre) * b for a, b in zip(x, y, strict=True)) / sum((a - centre) ** 2 for a in x)


def write(rows: list[dict[str, Any]], kept: list[dict[str, Any]], device: torch.device, dtype: torch.dtype) -> None:
    command = " ".join(["python -m benchmarks.attention", *sys.argv[1:]])
    facts = environment(device)
    RESULTS.mkdir(exist_ok=True)
    record = {
        "command": command,
        "environment": facts,
        "threads": THREADS,
        "heads": HEADS,
        "rows": rows,
        "rows_with_freed_memory_kept": kept,
    }
    (RESULTS / "attention.json").write_text(json.dumps(record, indent=1) + "\n")
    (RESULTS / "attention.md").write_text(report(rows, kept, command, facts, dtype))


def report(
    rows: list[dict[str, Any]], kept: list[dict[str, Any]], command: str, facts: dict[str, Any], dtype: torch.dtype
) -> str:
    """A table of lengths and kernels, then the slopes and the ratios at the longest."""
    lines = [
        "# Attention: memory and time against sequence length", "",
        f"`{command}`", "",
        f"Forward + backward, causal, B=1, {HEADS} heads, {dtype}, {THREADS} threads. Peak is above the inputs. Times "
        "are the median and the fastest of interleaved repetitions.", "",
        *(f"- {name}: {value}" for name, value in facts.items()), "",
        *table(rows),
    ]  # fmt: skip
    for head_dim in dict.fromkeys(row["head_dim"] for row in rows):
        lines += ["", *summary([row for row in rows if row["head_dim"] == head_dim], head_dim)]
    if kept:
        lines += ["", "With freed memory kept by the process, as in Remat's runs:", "", *table(kept)]
        lines += ["", *summary(kept, kept[0]["head_dim"])]
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A line a kernel and length."""
    return [
        "| D | S | kernel | runs | peak | median | fastest | repetitions |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {row['head_dim']} | {row['seq']} | {row['kernel']} | {row['runs']} | "
            f"{format_bytes(row['peak_bytes'])} | {format_seconds(row['median_seconds'])} | "
            f"{format_seconds(row['fastest_seconds'])} | {len(row['seconds'])} |"
            for row in rows
        ),
    ]


def summary(rows: list[dict[str, Any]], head_dim: int) -> list[str]:
    """Slopes of each kernel, and its time against flash at the longest length."""
    names = dict.fromkeys(row["kernel"] for row in rows)
    of = {name: [row for row in rows if row["kernel"] == name] for name in names}
    longest = rows[-1]["seq"]
    lines = [
        f"D={head_dim}; times are against flash at S={longest}:", "",
        "| kernel | slope of memory | slope of time | median time | fastest time |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for name, mine in of.items():
        ratios = [mine[-1][field] / of["flash"][-1][field] for field in ("median_seconds", "fastest_seconds")]
        slopes = [slope(mine, field) for field in ("peak_bytes", "median_seconds")]
        cells = [f"{value:.2f}" if value is not None else "–" for value in slopes] + [f"{r:.2f}x" for r in ratios]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
