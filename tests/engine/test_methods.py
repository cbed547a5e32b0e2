"""What a method never does is known from the spec alone, and refused the same way wherever it is asked for."""

import pytest

from engine.closed_form import predict
from engine.errors import UnsupportedError
from engine.measure import measure
from engine.methods import check_method, expand_for
from engine.result import Method
from engine.simulate import simulate
from engine.spec import RunSpec

REFUSED = [
    pytest.param("closed-form", {"model": "t5-base"}, "model: .* has no closed form", id="closed form of an encoder"),
    pytest.param("simulated", {"model": "phi-2", "mode": "inference"}, "model, mode: simulated inference", id="phi-2"),
    pytest.param("measured", {"model": "phi-2", "mode": "inference"}, "model, mode: measured inference", id="its run"),
    pytest.param(
        "simulated", {"sharding": "zero-2", "world_size": 8, "offload_optimizer": "cpu"},
        r"sharding, offload_\*: zero-2 over 8 ranks is simulated without", id="simulated ranks that offload",
    ),
    pytest.param(
        "simulated", {"sharding": "zero-3", "world_size": 2048}, "world_size: zero-3 is simulated over up to 1,024",
        id="many simulated ranks",
    ),
    pytest.param("simulated", {"attention": "triton"}, "attention: the triton kernel is not simulated", id="triton"),
    *(
        pytest.param(method, fields, says, id=f"{method} {name}")
        for method in ("simulated", "measured")
        for name, fields, says in (
            ("no dropout", {"checkpointing": "selective:norms+dropout"}, "checkpointing, dropout: there is no dropout"),
            ("tiny budget", {"checkpointing": "budget-0.001"}, "checkpointing: budget-0.001 is below what any plan"),
            ("t5, budget", {"model": "t5-base", "checkpointing": "budget-0.5"}, "checkpointing: .* one stack"),
            ("t5, fused loss", {"model": "t5-base", "loss": "fused"}, "loss: t5 has a loss of its own"),
            ("bert, chunks", {"model": "bert-large", "loss_chunks": 2}, "loss_chunks: bert has a loss of its own"),
            ("t5, offload", {"model": "t5-base", "offload_parameters": "cpu", "offload_optimizer": "cpu"},
             "offload_parameters: a decoder's blocks wait"),
        )
    ),
    pytest.param("measured", {"world_size": 17}, "world_size: at most 16 ranks", id="many measured ranks"),
    pytest.param(
        "measured", {"world_size": 2, "offload_activations": "cpu", "device": "cpu"},
        r"world_size, offload_\*: ranks are measured with offloading only", id="measured ranks that offload",
    ),
]  # fmt: skip
METHODS = {"closed-form": predict, "simulated": simulate, "measured": measure}


@pytest.mark.parametrize(("method", "fields", "says"), REFUSED)
def test_what_a_method_never_does_is_refused(method: Method, fields: dict, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        expand_for(method, {"model": "gpt:2,32,2", **fields}, {"seq": [16, 32]})
    with pytest.raises(UnsupportedError, match=says):
        METHODS[method](RunSpec.model_validate({"model": "gpt:2,32,2", "seq": 16, **fields}))


def test_a_gpu_may_offload_what_a_cpu_may_not() -> None:
    places = {"offload_parameters": "cpu", "offload_optimizer": "cpu"}
    spec = RunSpec(model="gpt:2,32,2", world_size=2, sharding="zero-3", **places)
    check_method(spec, "measured")
    check_method(spec, "measured", "cuda")
    with pytest.raises(UnsupportedError, match="FSDP2"):
        check_method(spec, "measured", "cpu")
