"""A training step of the real model on fake tensors: every allocation, no arithmetic, no GPU.

Fake tensors live on device `cpu`: torch cannot run autograd on fake `cuda` without a GPU, and `meta` sends attention
down another path. What a storage costs is the same; what CUDA's allocator makes of the trace is `engine.allocator`'s.
A deep model of equal blocks is recorded at two small depths and its step written out from them (`engine.extrapolate`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.allocator import replay
from engine.architecture import Architecture
from engine.checkpoint_names import Checkpointing, parse_checkpointing
from engine.closed_form.fits import fits
from engine.depth import at_depth, fixed_plan, sample_depth, shallow_depth
from engine.environment import environment
from engine.extrapolate import Depths, NotUniform, Program, deepen, program
from engine.measure import memory_of
from engine.methods import check_method
from engine.offload.assembly import offloads
from engine.recording import record_step
from engine.result import RunResult, Timeline, Timing
from engine.serving import simulate_inference
from engine.sharding.fake import fake_ranks
from engine.spec import RunSpec
from engine.trace import timeline
from engine.training import Training, build

CPU = torch.device("cpu")
MOST_MICRO_BATCHES = 3
"""The first finds no gradients, the last may send them on; those between do what the second does."""


@dataclass(slots=True)
class Recording:
    """The first and the steady step of a built run, and what else its result needs."""

    first: Program
    steady: Program
    parameters: int
    kernel: str
    notes: list[str]
    host_peak_bytes: int = 0
    nvme_bytes: int = 0
    nvme_written_bytes: int = 0


def simulate(spec: RunSpec) -> tuple[RunResult, Timeline]:
    """Memory of a steady step, exact to the storage, and the FLOPs it does. Raises UnsupportedError for what it
    cannot do."""
    check_method(spec, "simulated")
    if spec.mode == "inference":
        return simulate_inference(spec)
    batches = min(spec.grad_accumulation, MOST_MICRO_BATCHES)
    recording = _recorded(spec.model_copy(update={"grad_accumulation": batches}))
    if batches < spec.grad_accumulation:
        recording.notes.append(
            f"the timeline shows {batches} of {spec.grad_accumulation} micro-batches: the others repeat the second"
        )
    first, steady = recording.first.trace(), recording.steady.trace()
    footprint = replay([storage.bytes for storage in recording.steady.base], [first, steady])
    memory = memory_of(steady, footprint.reserved_peak_bytes)
    _, first_peak = first.peak()
    memory.first_step_peak_bytes = first_peak if first_peak > (memory.device_peak_bytes or 0) else None
    memory.host_peak_bytes, memory.nvme_bytes = recording.host_peak_bytes, recording.nvme_bytes
    memory.nvme_written_bytes_per_step = recording.nvme_written_bytes or None
    model_flops, again_flops = (
        recording.steady.flops(recomputed=again) * spec.grad_accumulation // batches for again in (False, True)
    )
    result = RunResult(
        spec=spec,
        spec_hash=spec.spec_hash,
        method="simulated",
        outcome="ok",
        memory=memory,
        timing=Timing(model_flops=model_flops, hardware_flops=model_flops + again_flops),
        parameters=recording.parameters,
        fits=fits(spec, memory.device_peak_bytes or 0),
        warnings=[*spec.architecture.notes, *recording.notes],
        environment=environment(CPU) | {"device_kind": "fake", "attention_kernel": recording.kernel},
    )
    return result, timeline(steady)


def _recorded(spec: RunSpec) -> Recording:
    """The first and the steady step at full depth, by way of small depths where the model's blocks repeat."""
    arch, plan = spec.architecture, parse_checkpointing(spec.checkpointing)
    steps = 1 if _steps_repeat(spec, arch) else 2
    depths = None if offloads(spec) else shallow_depth(arch, plan, reach=reach(spec))
    if depths is not None:
        try:
            return _deep(spec, arch, fixed_plan(arch, plan), depths, steps)
        except NotUniform:
            pass  # the blocks differ: every one of them is simulated
    return _record(spec, arch, plan, steps)


def _steps_repeat(spec: RunSpec, arch: Architecture) -> bool:
    """Whether the first step does to memory what the next one does, as seen at a small depth, where it costs little.
    Then one step is enough."""
    blocks = sample_depth(arch)
    if offloads(spec) or 2 * blocks > arch.layers:
        return False
    sample = _record(spec, at_depth(arch, blocks), parse_checkpointing("per-layer"))
    return sample.first == sample.steady


def reach(spec: RunSpec) -> int:
    """Over how many blocks more a block's storages may live on: FSDP2 gathers one ahead and scatters one behind."""
    return 2 if spec.sharding == "zero-3" and spec.world_size > 1 else 1


def _deep(spec: RunSpec, arch: Architecture, plan: Checkpointing, depths: Depths, steps: int = 2) -> Recording:
    """The recording at full depth, written out from two shallow ones. Raises NotUniform."""
    shallow = _record(spec, at_depth(arch, depths.blocks), plan, steps)
    deeper = _record(spec, at_depth(arch, depths.blocks + depths.period), plan, steps)
    per_period = deeper.parameters - shallow.parameters
    shallow.parameters += per_period * (arch.layers - depths.blocks) // depths.period
    same = shallow.first is shallow.steady
    shallow.steady = deepen(shallow.steady, deeper.steady, depths, arch.layers)
    shallow.first = shallow.steady if same else deepen(shallow.first, deeper.first, depths, arch.layers)
    return shallow


def _record(spec: RunSpec, arch: Architecture, plan: Checkpointing, steps: int = 2) -> Recording:
    """Build the run and record its first steps."""
    with fake_ranks(_ranks(spec)), FakeTensorMode(allow_non_fake_inputs=True):
        training = build(spec, CPU, arch=arch, plan=plan, initialised=False)
        try:
            programs = [program(record_step(training, index)) for index in range(steps)]
            return _recording(training, programs[0], programs[-1])
        finally:
            training.close()


def _ranks(spec: RunSpec) -> int:
    """Ranks that the step is run among. Unsharded ones that offload do so each for itself, like a single one."""
    return 1 if offloads(spec) else spec.world_size


def _recording(training: Training, first: Program, steady: Program) -> Recording:
    recording = Recording(
        first=first,
        steady=steady,
        parameters=sum(_elements(parameter) for parameter in training.model.parameters()),
        kernel=training.kernel.name,
        notes=list(training.notes),
    )
    if training.offload:
        ledger = training.offload.ledger
        recording.host_peak_bytes, recording.nvme_bytes = ledger.host.peak_bytes, ledger.nvme.peak_bytes
        recording.nvme_written_bytes = ledger.moved["written"] // 2  # two steps were run
    return recording


def _elements(parameter: Tensor) -> int:
    return parameter.numel()
