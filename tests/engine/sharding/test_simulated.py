"""A rank among any number of ranks, simulated in one process: the closed form's peak, and the deep step's storages."""

from typing import Any

import pytest

from engine import simulate as simulation
from engine.checkpoint_names import parse_checkpointing
from engine.closed_form import predict
from engine.depth import fixed_plan, shallow_depth
from engine.errors import UnsupportedError
from engine.simulate import simulate
from engine.spec import RunSpec

WIDE = "llama:2,1024,8,8,2816,32000"  # rows enough that sharding over 1024 ranks pads none
STAGES = ["zero-1", "zero-2", "zero-3"]


def spec_of(**fields: Any) -> RunSpec:
    return RunSpec(**{"model": "llama:3,64,4,2,128,1024", "micro_batch": 2, "seq": 64, **fields})


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("policy", ["none", "per-layer"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_simulated_rank_is_the_closed_form_s(stage: str, policy: str, ranks: int) -> None:
    spec = spec_of(sharding=stage, world_size=ranks, checkpointing=policy)
    simulated, closed = simulate(spec)[0].memory, predict(spec).memory
    assert simulated.device_peak_bytes == pytest.approx(closed.device_peak_bytes, rel=0.005)


@pytest.mark.parametrize("stage", STAGES)
def test_more_ranks_never_need_more_each(stage: str) -> None:
    peaks = [
        simulate(spec_of(model=WIDE, sharding=stage, world_size=ranks))[0].memory.device_peak_bytes or 0
        for ranks in (1, 2, 8, 64, 1024)
    ]
    assert peaks[1:] == sorted(peaks[1:], reverse=True)
    assert peaks[0] > peaks[2]  # alone there are neither shards nor the collectives' buffers, which 2 ranks must save


@pytest.mark.parametrize(
    ("stage", "fields"),
    [
        ("none", {}),
        ("zero-1", {"optimizer": "adamw-8bit"}),
        ("zero-2", {"grad_accumulation": 2, "checkpointing": "per-layer"}),
        ("zero-3", {}),
        ("zero-3", {"model": "gpt:14,32,2,64", "grad_accumulation": 2, "checkpointing": "per-layer"}),
        ("zero-3", {"model": "gpt:16,32,2,64", "checkpointing": "every-2"}),
    ],
)
def test_a_deep_rank_written_out_is_the_one_simulated_in_full(stage: str, fields: dict[str, Any]) -> None:
    spec = spec_of(**{"model": "llama:13,32,4,2,64,64", "sharding": stage, "world_size": 8, "seq": 16, **fields})
    arch, plan = spec.architecture, parse_checkpointing(spec.checkpointing)
    depths = shallow_depth(arch, plan, reach=simulation.reach(spec))
    assert depths is not None
    written = simulation._deep(spec, arch, fixed_plan(arch, plan), depths)
    full = simulation._record(spec, arch, plan)
    assert written.steady.trace() == full.steady.trace()
    assert written.first.trace() == full.first.trace()


def test_every_rank_of_a_large_model_in_seconds() -> None:
    memory = simulate(spec_of(model="llama-3.1-70b", sharding="zero-3", world_size=1024, seq=512))[0].memory
    assert (memory.at_peak.optimizer_states if memory.at_peak else 0) == pytest.approx(
        12 * 70_553_706_496 / 1024, rel=0.01
    )


def test_sharded_ranks_that_offload_are_not_simulated() -> None:
    with pytest.raises(UnsupportedError, match=r"sharding, offload_\*: zero-2 over 8 ranks is simulated without"):
        simulate(spec_of(sharding="zero-2", world_size=8, offload_optimizer="cpu"))


def test_more_ranks_than_a_simulation_can_hold_are_refused() -> None:
    spec = RunSpec(model="gpt:2,64,2,128", seq=16, sharding="zero-3", world_size=1025)
    with pytest.raises(UnsupportedError, match="world_size: zero-3 is simulated over up to 1,024 ranks"):
        simulate(spec)


def test_no_process_group_is_left() -> None:
    import torch.distributed as dist

    simulate(spec_of(sharding="zero-1", world_size=2))
    assert not dist.is_initialized()
