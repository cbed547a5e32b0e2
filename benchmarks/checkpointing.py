"""Remat's checkpointing beside its peers, on one model, in one run: `python -m benchmarks.checkpointing`.

Each contender trains the same decoder from the same seed in a process of its own that stays alive; timed steps are
interleaved, one of each in turn, so that a disturbance of the machine hits all of them. As in every run of Remat, freed
memory stays with the process (`engine.heap`). Peaks come from the profiler's
allocator events of one more step (live bytes above what is alive between steps). Contenders:

- `none`, and Remat's policies;
- `torch.utils.checkpoint` by hand around every block;
- torch.compile with `activation_memory_budget`, backends aot_eager_decomp_partition and inductor, and for each of them
  the plan of Remat's that recomputes least among those whose peak is no higher;
- transformers' `gradient_checkpointing_enable` on its GPT-2 of the same shape, beside Remat's per-layer on that class.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MODEL = "gpt:6,512,8,2048"
BATCH, SEQ = 2, 512
BUDGETS = (0.5, 0.2)
BACKENDS = ("aot_eager_decomp_partition", "inductor")
THREADS = 2
RESULTS = Path(__file__).parent / "results"
MIB = 2**20
GPT2 = {"model_type": "gpt2", "n_layer": 6, "n_embd": 512, "n_head": 8, "vocab_size": 2048, "n_positions": SEQ}


def build(name: str) -> Any:
    """The training run of a contender."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from engine.spec import RunSpec
    from engine.training import build as build_run

    kind, _, detail = name.partition(" ")
    policy = detail if kind in ("remat", "transformers-remat") else "none"
    model: Any = GPT2 if kind.startswith("transformers") else MODEL
    spec = RunSpec(
        model=model, micro_batch=BATCH, seq=SEQ, precision="fp32", device="cpu", attention="standard",
        checkpointing=policy,
    )  # fmt: skip
    training = build_run(spec, torch.device("cpu"))
    inner: Any = training.model
    if kind == "by-hand":
        for block in inner.blocks:
            block.forward = _checkpointed(checkpoint, block.forward)
    elif kind == "transformers" and detail == "gradient_checkpointing_enable":
        inner.inside.gradient_checkpointing_enable({"use_reentrant": False})
    elif kind == "compile":
        backend, budget = detail.split(" ")
        torch._functorch.config.activation_memory_budget = float(budget)
        inner.forward = torch.compile(inner.forward, backend=backend, fullgraph=True)  # one graph: one budget
    return training


def _checkpointed(checkpoint: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: checkpoint(forward, *arguments, use_reentrant=False)


def contend(name: str, pipe: Connection) -> None:
    """A contender's process: `step` -> seconds, `peak` -> (peak, saved) bytes, until `end`."""
    import torch

    from engine.heap import keep_freed_memory
    from engine.observe import MemoryPass

    keep_freed_memory()
    torch.set_num_threads(THREADS)
    training = build(name)

    for index in range(2):
        training.step(index)
    pipe.send("ready")
    while (asked := pipe.recv()) != "end":
        if asked == "step":
            started = time.perf_counter()
            training.step(2)
            pipe.send(time.perf_counter() - started)
        else:
            trace, _ = MemoryPass(training).run(2)
            base = sum(training.base_bytes().values())
            pipe.send((trace.peak()[1] - base, trace.saved_bytes()))


class Contender:
    def __init__(self, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.name, self.seconds = name, list[float]()
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=contend, args=(name, other), daemon=True)
        self.process.start()
        other.close()
        self.pipe.recv()
        self.peak, self.saved = self.ask("peak")

    def ask(self, what: str) -> Any:
        self.pipe.send(what)
        return self.pipe.recv()

    def row(self) -> dict[str, Any]:
        ranked = sorted(self.seconds)
        return {
            "contender": self.name,
            "fastest_seconds": ranked[0],
            "step_seconds": statistics.median(ranked),
            "p20_seconds": ranked[len(ranked) // 5],
            "p80_seconds": ranked[-1 - len(ranked) // 5],
            "activation_peak_bytes": self.peak,
            "saved_activation_bytes": self.saved,
        }


def simulated_peak(policy: str) -> int:
    """What Remat's simulation says a policy's activation peak is (it equals the measured one to the byte)."""
    from engine.simulate import simulate
    from engine.spec import RunSpec

    spec = RunSpec(
        model=MODEL, micro_batch=BATCH, seq=SEQ, precision="fp32", device="cpu", attention="standard",
        checkpointing=policy,
    )  # fmt: skip
    memory = simulate(spec)[0].memory
    assert memory.device_peak_bytes is not None
    assert memory.at_peak is not None
    return memory.device_peak_bytes - memory.at_peak.parameters - memory.at_peak.optimizer_states


def within(target: int, peaks: dict[str, int]) -> str:
    """Remat's first policy, from those that recompute least on, whose peak is at most `target`."""
    return next((policy for policy in peaks if peaks[policy] <= target), "per-layer")


def run(rounds: int) -> list[dict[str, Any]]:
    ours = ["none", "per-layer", "selective", "nested", "budget-0.5", "budget-0.25"]
    names = [f"remat {policy}" for policy in ours] + ["by-hand torch.utils.checkpoint"]
    names += [f"compile {backend} {budget}" for backend in BACKENDS for budget in BUDGETS]
    names += ["transformers none", "transformers gradient_checkpointing_enable", "transformers-remat per-layer"]
    contenders = {name: Contender(name) for name in names}
    budgets = [f"budget-{percent / 100:g}" for percent in range(95, 5, -5)]
    peaks = {policy: simulated_peak(policy) for policy in ["none", *budgets, "per-layer"]}
    equals = {}
    for name in [name for name in names if name.startswith("compile")]:
        equals[name] = f"remat {within(contenders[name].peak, peaks)}"
        if equals[name] not in contenders:
            contenders[equals[name]] = Contender(equals[name])
    for _ in range(rounds):
        for contender in contenders.values():
            contender.seconds.append(contender.ask("step"))
    for contender in contenders.values():
        contender.pipe.send("end")
        contender.process.join()
    rows = [contender.row() for contender in contenders.values()]
    for row in rows:
        if row["contender"] in equals:
            rival = contenders[equals[row["contender"]]]
            row["ours_at_no_more_memory"] = rival.name
            row["ours_over_theirs"] = min(rival.seconds) / row["fastest_seconds"]
            row["ours_over_theirs_median"] = statistics.median(rival.seconds) / row["step_seconds"]
    return rows


def markdown(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    lines = [
        "# Checkpointing beside its peers", "",
        f"`{about['command']}` on {about['cpu']}, {about['threads']} threads, {about['date']}; torch {about['torch']}, "
        f"transformers {about['transformers']}. {MODEL}, batch {BATCH}, sequence {SEQ}, fp32, standard attention. "
        f"{about['rounds']} interleaved steps of each.", "",
        "Peak: live bytes above parameters and optimizer states (gradients included). The last column is the "
        "fastest step of Remat's plan with no higher peak over the contender's, since other load only ever adds time "
        "(in brackets: median over median). Freed memory stays with each process.", "",
        "| contender | fastest step, s | median, s (p20 to p80) | peak, MiB | saved for backward, MiB "
        "| ours at no more memory |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        spread = f"{row['step_seconds']:.3f} ({row['p20_seconds']:.3f} to {row['p80_seconds']:.3f})"
        peaks = f"{row['activation_peak_bytes'] / MIB:.1f} | {row['saved_activation_bytes'] / MIB:.1f}"
        rival = ""
        if "ours_over_theirs" in row:
            ratios = f"{row['ours_over_theirs']:.2f}× ({row['ours_over_theirs_median']:.2f}×)"
            rival = f"{row['ours_at_no_more_memory']}: {ratios}"
        lines.append(f"| {row['contender']} | {row['fastest_seconds']:.3f} | {spread} | {peaks} | {rival} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    import torch
    import transformers

    parser = argparse.ArgumentParser(description="Remat's checkpointing beside its peers.")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved timed steps of each contender")
    rounds = parser.parse_args().rounds
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    about = {
        "command": f"python -m benchmarks.checkpointing --rounds {rounds}",
        "cpu": cpus[0].partition(":")[2].strip() if cpus else platform.processor(),
        "threads": THREADS,
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rounds": rounds,
    }
    rows = run(rounds)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "checkpointing.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    (RESULTS / "checkpointing.md").write_text(markdown(rows, about))
    print(markdown(rows, about))


if __name__ == "__main__":
    main()
