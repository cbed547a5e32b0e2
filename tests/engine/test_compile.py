"""torch.compile: really compiled, the same loss, and refused where it could not be honest."""

import pytest

from engine.measure import measure
from engine.spec import RunSpec

SPEC = {"model": "gpt:2,64,2,256", "seq": 64, "precision": "fp32", "device": "cpu", "steps": 1, "warmup": 1}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch while it traces
def test_a_compiled_run_learns_the_same_and_keeps_no_more() -> None:
    eager, compiled = (measure(RunSpec.model_validate({**SPEC, "compile": flag}))[0] for flag in (False, True))
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-4)
    assert compiled.memory.saved_activation_bytes is not None
    assert eager.memory.saved_activation_bytes is not None
    assert compiled.memory.saved_activation_bytes < eager.memory.saved_activation_bytes


@pytest.mark.parametrize(
    "field",
    [{"checkpointing": "per-layer"}, {"world_size": 2}, {"mode": "inference"}, {"offload_activations": "cpu"}],
    ids=lambda field: next(iter(field)),
)
def test_what_the_compiler_cannot_trace_is_refused_by_name(field: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="compile"):
        RunSpec.model_validate({**SPEC, "compile": True, **field})
