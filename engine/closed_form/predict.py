"""RunSpec -> RunResult by closed form."""

from __future__ import annotations

from engine.closed_form.fits import fits, overdrawn
from engine.closed_form.inference import predict_inference
from engine.closed_form.ledger import ledger, reserved_rows
from engine.closed_form.ops import predicts_cuda
from engine.closed_form.pitfalls import pitfalls
from engine.closed_form.residency import residency
from engine.closed_form.states import parameter_elements
from engine.closed_form.timing import timing
from engine.closed_form.training import walk_step
from engine.methods import check_method
from engine.result import AtPeak, Memory, RunResult
from engine.spec import RunSpec


def predict(spec: RunSpec) -> RunResult:
    """What a spec costs. Raises UnsupportedError, naming the field, for what has no closed form."""
    check_method(spec, "closed-form")
    return predict_inference(spec) if spec.mode == "inference" else _predict_training(spec)


def _predict_training(spec: RunSpec) -> RunResult:
    step, place = walk_step(spec), residency(spec)
    meter, on_cuda = step.meter, predicts_cuda(spec)
    reserved = step.reserved_bytes if on_cuda else None
    return RunResult(
        spec=spec,
        spec_hash=spec.spec_hash,
        method="closed-form",
        outcome="ok",
        memory=Memory(
            device_peak_bytes=meter.peak,
            device_reserved_bytes=reserved,
            host_peak_bytes=place.host + step.hosted_bytes,
            nvme_bytes=place.nvme,
            nvme_written_bytes_per_step=place.nvme_written or None,
            saved_activation_bytes=step.saved_bytes,
            peak_phase=meter.peak_phase,
            at_peak=AtPeak(**meter.at_peak),
        ),
        timing=timing(spec, step.schedule, step.hosted_bytes),
        parameters=parameter_elements(spec.architecture),
        fits=fits(spec, meter.peak),
        ledger=[*ledger(spec, step.schedule), *(reserved_rows(step) if on_cuda else [])],
        warnings=[*spec.architecture.notes, *pitfalls(spec, meter), *overdrawn(spec, reserved)],
    )
