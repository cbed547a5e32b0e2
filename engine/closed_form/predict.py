"""RunSpec -> RunResult by closed form."""

from __future__ import annotations

from collections.abc import Iterable

from engine.closed_form.block import block_tape, context_of
from engine.closed_form.states import parameter_elements
from engine.closed_form.tape import Tensor
from engine.closed_form.training import walk_step
from engine.errors import UnsupportedError
from engine.result import AtPeak, LedgerRow, Memory, RunResult
from engine.spec import RunSpec


def predict(spec: RunSpec) -> RunResult:
    """What a spec costs. Raises UnsupportedError, naming the field, for what has no closed form."""
    if spec.architecture.style == "other":
        raise UnsupportedError("model", f"{spec.architecture.name} has no closed form: use method=simulated")
    if spec.mode == "inference":
        raise UnsupportedError("mode", "inference has no closed form yet")
    step = walk_step(spec)
    meter = step.meter
    return RunResult(
        spec=spec,
        spec_hash=spec.spec_hash,
        method="closed-form",
        outcome="ok",
        memory=Memory(
            device_peak_bytes=meter.peak,
            host_peak_bytes=0,
            nvme_bytes=0,
            saved_activation_bytes=step.saved_bytes,
            peak_phase=meter.peak_phase,
            at_peak=AtPeak(**meter.at_peak),
        ),
        parameters=parameter_elements(spec.architecture),
        ledger=ledger(spec),
    )


def ledger(spec: RunSpec) -> list[LedgerRow]:
    """The tensors alive when forward ends; their bytes sum to `saved_activation_bytes`."""
    context = context_of(spec)
    return _rows(block_tape(context).saved.values(), spec.architecture.layers)


def _rows(tensors: Iterable[Tensor], count: int) -> list[LedgerRow]:
    return [
        LedgerRow(
            tensor=tensor.name,
            shape=list(tensor.shape),
            dtype=tensor.dtype,
            bytes=tensor.bytes * count,
            group=tensor.group,
            count=count,
            formula=tensor.formula,
        )
        for tensor in tensors
    ]
