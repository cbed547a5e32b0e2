"""Offloading's own cost: overlap against serial, the host update against torch's, file streaming against a raw copy.

    python -m benchmarks.offload

1. A training step without offloading, and with each tier, serial and overlapped, taken in turns.
2. The update of offloaded states (host memory) against one `torch.optim.AdamW(fused=True)` step on the same elements,
   in turns, and against DeepSpeed's CPUAdam where it is installed and builds; the copies that offloading adds are
   shown apart.
3. Units streamed through the NVMe tier (read ahead, written behind, no arithmetic) against raw O_DIRECT copies of the
   same bytes on the same disk in the same run: one request after another, and with a reader beside a writer.

Writes benchmarks/results/offload.{json,md}; exits 1 if the update takes over 1.15x of torch's or streaming falls under
80 % of the raw copy. What needs a GPU is measured by `python -m benchmarks.offload_cuda`.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from torch import nn

from engine.environment import environment
from engine.offload.link import Link
from engine.offload.nvme import NvmeFile, file_system, nvme_directory, prepare_directory
from engine.offload.optimizer import OffloadedOptimizer
from engine.offload.states import HostStates, NvmeStates, Unit, make_units
from engine.offload.tiers import Arena, HostBlock, Ledger
from engine.optimizers import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY
from engine.recipes import RECIPES
from engine.spec import RunSpec
from engine.training import build
from engine.units import MIB, format_bytes, format_count, format_seconds

CPU = torch.device("cpu")
RESULTS = Path(__file__).parent / "results"
MODEL = {"model": "gpt:8,512,8", "precision": "fp32", "device": "cpu"}
TIERS: dict[str, dict[str, Any]] = {
    "no offloading": {},
    "optimizer in host memory": {"offload_optimizer": "cpu"},
    "optimizer on NVMe": {"offload_optimizer": "nvme"},
    "optimizer and parameters on NVMe": {"offload_optimizer": "nvme", "offload_parameters": "nvme"},
    "activations in host memory": {"offload_activations": "cpu"},
}
ROUNDS, STEP_ROUNDS = 7, 5
ELEMENTS, UNITS = 24 * 2**20, 8
REQUEST_BYTES = 16 * MIB


def in_turns(calls: dict[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of each call, round by round, so that a busy machine is as unkind to one as to the other."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(call())
    return seconds


def clocked(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def overlap() -> list[dict[str, Any]]:
    """Step seconds of each tier, serial and overlapped."""
    runs = {}
    for tier, fields in TIERS.items():
        for overlapped in (False, True) if fields else (True,):
            training = build(RunSpec(**MODEL, **fields, offload_overlap=overlapped), CPU)
            training.step(0)
            runs[tier, overlapped] = training
    numbers = dict.fromkeys(runs, 0)

    def step(key: tuple[str, bool]) -> float:
        numbers[key] += 1
        return clocked(lambda: runs[key].step(numbers[key]))

    try:
        seconds = in_turns({str(key): lambda key=key: step(key) for key in runs}, STEP_ROUNDS)
    finally:
        for training in runs.values():
            training.close()
    plain = statistics.median(seconds[str(("no offloading", True))])
    return [
        {
            "tier": tier,
            "overlap": overlapped,
            "step_seconds": statistics.median(seconds[str((tier, overlapped))]),
            "against_none": statistics.median(seconds[str((tier, overlapped))]) / plain,
        }
        for tier, overlapped in runs
    ]


def deepspeed_step(weights: list[nn.Parameter], gradient: torch.Tensor) -> Callable[[], float] | str:
    """A step of DeepSpeed's CPUAdam, which compiles its kernel now, or why there is none."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        adam = DeepSpeedCPUAdam(
            weights, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, adamw_mode=True
        )
    except ImportError as error:
        return f"not installed ({error}): pip install deepspeed"
    except Exception as error:  # a compiler, a header, a CPU that it does not know: it may lack anything
        return f"does not build: {type(error).__name__}: {str(error).splitlines()[0][:200]}"

    def step() -> float:
        for weight in weights:
            weight.grad = gradient.clone()
        return clocked(adam.step)

    return step


def host_update() -> dict[str, Any]:
    """The offloaded update against torch's fused AdamW and, where it is at hand, DeepSpeed's CPUAdam."""
    ours = [nn.Parameter(torch.randn(ELEMENTS // UNITS)) for _ in range(UNITS)]
    theirs, peers = ([nn.Parameter(weight.detach().clone()) for weight in ours] for _ in range(2))
    gradient = torch.randn(ELEMENTS // UNITS)
    ledger, recipe = Ledger(), RECIPES["fp32"]
    link, arena = Link(CPU, ledger, overlap=False), Arena(ledger, CPU)
    units = make_units([(str(index), [weight]) for index, weight in enumerate(ours)], recipe, "adamw")
    states = HostStates(units, arena, link)
    for unit in units:
        states.create(unit)
    offloaded = OffloadedOptimizer(
        units, states, link, arena, recipe=recipe, optimizer="adamw",
        deliver=lambda unit, slots: [link.update(slots[0].parameter, unit.parameters[0])],
    )  # fmt: skip
    fused = torch.optim.AdamW(theirs, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True)
    whole: list[float] = []

    def our_step() -> float:
        for weight in ours:
            (weight * gradient).sum().backward()
        before = offloaded.arithmetic_seconds
        whole.append(clocked(offloaded.step))
        return offloaded.arithmetic_seconds - before

    def their_step() -> float:
        for weight in theirs:
            weight.grad = gradient.clone()
        return clocked(fused.step)

    peer = deepspeed_step(peers, gradient)
    calls = {"ours": our_step, "torch": their_step} | ({} if isinstance(peer, str) else {"deepspeed": peer})
    seconds = in_turns(calls, 3 * ROUNDS)
    same = all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    offloaded.close()
    link.close()
    best = {name: min(values[2:]) for name, values in seconds.items()}
    return {
        "elements": ELEMENTS,
        "our_update_seconds": best["ours"],
        "torch_fused_adamw_seconds": best["torch"],
        "deepspeed_seconds": best.get("deepspeed"),
        "deepspeed_missing": peer if isinstance(peer, str) else None,
        "ratio": best["ours"] / best["torch"],
        "our_step_with_weights_copied_up_seconds": min(whole[2:]),
        "weights_bit_equal": same,
    }


def streaming() -> dict[str, Any]:
    """Bytes read and written per second: the tier's pipeline, and raw copies of the same bytes."""
    directory = nvme_directory()
    prepare_directory(directory)
    ledger, recipe = Ledger(), RECIPES["fp32"]
    link, arena = Link(CPU, ledger, overlap=True), Arena(ledger, CPU)
    weights = [torch.randn(ELEMENTS // UNITS) for _ in range(UNITS)]
    units = make_units([(str(index), [weight]) for index, weight in enumerate(weights)], recipe, "adamw")
    states = NvmeStates(units, arena, link, directory, recipe=recipe)
    for unit in units:
        states.create(unit)
    count = sum(unit.layout.total_bytes for unit in units)
    source, target = NvmeFile(directory, count, ledger), NvmeFile(directory, count, ledger)
    blocks = [arena.take(REQUEST_BYTES) for _ in range(3)]
    for offset in range(0, count, REQUEST_BYTES):
        assert blocks[0].tensor is not None
        source.write(offset, part(blocks[0], min(REQUEST_BYTES, count - offset)))
    try:
        seconds = in_turns(
            {
                "tier": lambda: clocked(lambda: stream(states, units)),
                "raw": lambda: clocked(lambda: copy(source, target, count, blocks[0])),
                "raw with a reader beside a writer": lambda: clocked(
                    lambda: copy_beside(source, target, count, blocks)
                ),
            }
        )
    finally:
        for closing in (states, source, target, link):
            closing.close()
    speeds = {name: 2 * count / min(values) for name, values in seconds.items()}
    return {
        "bytes_each_way": count,
        "disk": file_system(directory),
        "bytes_per_second": speeds,
        "tier_against_raw": speeds["tier"] / speeds["raw"],
        "tier_against_raw_with_a_reader_beside_a_writer": speeds["tier"] / speeds["raw with a reader beside a writer"],
    }


def part(block: HostBlock, count: int) -> memoryview:
    assert block.memory is not None
    return block.memory[:count]


def stream(states: NvmeStates, units: list[Unit]) -> None:
    """Every unit through host memory and back, as an update would ask for them."""
    for unit in units:
        states.prefetch(unit)
    for unit in units:
        states.load(unit)
        states.store(unit)
    states.settle()


def copy(source: NvmeFile, target: NvmeFile, count: int, block: HostBlock) -> None:
    for offset in range(0, count, REQUEST_BYTES):
        piece = part(block, min(REQUEST_BYTES, count - offset))
        source.read(offset, piece)
        target.write(offset, piece)


def copy_beside(source: NvmeFile, target: NvmeFile, count: int, blocks: list[HostBlock]) -> None:
    free: Queue[HostBlock] = Queue()
    full: Queue[tuple[int, memoryview, HostBlock]] = Queue()
    for block in blocks:
        free.put(block)
    offsets = range(0, count, REQUEST_BYTES)

    def write() -> None:
        for _ in offsets:
            offset, piece, block = full.get()
            target.write(offset, piece)
            free.put(block)

    writer = threading.Thread(target=write)
    writer.start()
    for offset in offsets:
        block = free.get()
        piece = part(block, min(REQUEST_BYTES, count - offset))
        source.read(offset, piece)
        full.put((offset, piece, block))
    writer.join()


def report(results: dict[str, Any]) -> str:
    facts, update, disk = results["environment"], results["host_update"], results["streaming"]
    lines = [
        "# Offloading",
        "",
        f"`{results['command']}` on {facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads, torch "
        f"{facts['torch']}, {facts['os']}. On a CPU the device and the host are the same memory: bytes are exact, "
        "transfer times say nothing about PCIe.",
        "",
        f"## A step of {MODEL['model']}, fp32, 512 tokens",
        "",
        "| tier | transfers | step (median) | against none |",
        "|---|---|---|---|",
    ]
    for row in results["overlap"]:
        kind = "–" if row["tier"] == "no offloading" else "overlapped" if row["overlap"] else "serial"
        lines.append(f"| {row['tier']} | {kind} | {format_seconds(row['step_seconds'])} | {row['against_none']:.2f}x |")
    lines += [
        "",
        f"## The update of {format_count(update['elements'])} fp32 elements",
        "",
        "| | seconds (best) |",
        "|---|---|",
        f"| offloaded states, update | {format_seconds(update['our_update_seconds'])} |",
        f"| torch.optim.AdamW(fused=True) | {format_seconds(update['torch_fused_adamw_seconds'])} |",
        f"| DeepSpeed's CPUAdam | {update['deepspeed_missing'] or format_seconds(update['deepspeed_seconds'])} |",
        f"| offloaded, with the weights copied up | "
        f"{format_seconds(update['our_step_with_weights_copied_up_seconds'])} |",
        "",
        f"Ours to torch's: {update['ratio']:.2f}; weights bit-equal: {update['weights_bit_equal']}. torchao's "
        "CPUOffloadOptimizer needs a CUDA device: `python -m benchmarks.offload_cuda`.",
        "",
        f"## NVMe: {format_bytes(disk['bytes_each_way'])} read and written, {disk['disk']}",
        "",
        "| | bytes per second, both ways together (best) |",
        "|---|---|",
        *(f"| {name} | {format_count(speed, 'B/s')} |" for name, speed in disk["bytes_per_second"].items()),
        "",
        f"The tier reaches {disk['tier_against_raw']:.0%} of a raw O_DIRECT copy and "
        f"{disk['tier_against_raw_with_a_reader_beside_a_writer']:.0%} of one with a reader beside a writer.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    results = {
        "command": "python -m benchmarks.offload",
        "environment": environment(CPU),
        "host_update": host_update(),
        "streaming": streaming(),
        "overlap": overlap(),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "offload.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "offload.md").write_text(report(results))
    print(report(results))
    sys.exit(results["host_update"]["ratio"] > 1.15 or results["streaming"]["tier_against_raw"] < 0.8)


if __name__ == "__main__":
    main()
