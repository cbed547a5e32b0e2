"""FSDP2's buffers by hand: what is alive when, and what the side streams' pools keep reserved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.closed_form import predict
from engine.closed_form.gathering import OURS, Gathering, Wrapping
from engine.closed_form.training import walk_step
from engine.closed_form.walk import Meter
from engine.spec import RunSpec

BLOCK, REST, EMBEDDING, RANKS, LAYERS = 80, 400, 160, 4, 3
SPEC = RunSpec(model="llama:6,64,4,2,176,192", seq=48, micro_batch=2, sharding="zero-3", world_size=4, gpu="h100")


def walked(wrapping: Wrapping) -> tuple[Gathering, dict[str, int]]:
    """A step of three blocks whose gradients appear when their backward ends; bytes alive at four moments."""
    meter, alive = Meter(), {}
    apart = EMBEDDING if wrapping.embedding_apart else 0
    gathering = Gathering(meter, BLOCK, REST, RANKS, accumulated=False, wrapping=wrapping, embedding=apart)
    gathering.start_forward(LAYERS)
    for _ in range(LAYERS):
        gathering.before_block()
        gathering.after_block()
    gathering.end_forward()
    alive["loss"] = meter.total
    meter.add("gradients", REST - apart)
    gathering.start_backward()
    gathering.after_head(REST - apart)
    alive["head done"] = meter.total
    for _ in range(LAYERS):
        gathering.before_backward(1)
        meter.add("gradients", BLOCK)
        gathering.after_backward(BLOCK)
    meter.add("gradients", apart)
    gathering.finish(apart or REST)
    alive["end"] = meter.total
    return gathering, alive


def test_ours_by_hand() -> None:
    gathering, alive = walked(OURS)
    assert alive == {"loss": REST, "head done": 2 * REST + BLOCK, "end": (3 * BLOCK + REST) // RANKS}
    assert gathering.gathered.peak == REST + BLOCK  # the first block is gathered before the rest's buffer goes
    assert gathering.scattered.peak == alive["end"]
    assert gathering.side_pools_bytes == gathering.gathered.peak + gathering.scattered.peak
    assert gathering.meter.aside == alive["end"]  # the sharded gradients


@pytest.mark.parametrize(
    ("wrapping", "at_loss"),
    [
        pytest.param(Wrapping(staying=1), REST + BLOCK, id="last block stays"),
        pytest.param(Wrapping(staying=3), REST + 3 * BLOCK, id="all stay"),
        pytest.param(Wrapping(embedding_apart=True), REST - EMBEDDING, id="embedding apart"),
    ],
)
def test_what_is_whole_when_the_loss_runs(wrapping: Wrapping, at_loss: int) -> None:
    gathering, alive = walked(wrapping)
    assert alive["loss"] == at_loss
    assert alive["end"] == (3 * BLOCK + REST) // RANKS
    assert gathering.meter.live["parameters"] == gathering.meter.live["temporaries"] == 0


def test_fp32_gradients_take_twice_the_pool() -> None:
    ours, wide = (walked(Wrapping(fp32=fp32))[0].scattered.peak for fp32 in (False, True))
    assert wide == 2 * ours


def test_a_buffer_on_the_scatter_stream_moves_from_one_pool_to_the_other() -> None:
    beside, aside = (walked(Wrapping(scatter_input_aside=where))[0] for where in (False, True))
    assert aside.meter.peak == beside.meter.peak
    assert aside.scattered.peak == beside.scattered.peak + REST
    assert aside.meter.main_peak <= beside.meter.main_peak


def test_fp32_shards_are_the_master_copy() -> None:
    """12 bytes a parameter between steps rather than 14, and 4 rather than 2 of gradients."""
    ours, theirs = walk_step(SPEC).meter, walk_step(SPEC, Wrapping(fp32=True)).meter
    shard = predict(SPEC).parameters / SPEC.world_size
    kept = [sum(meter.live[name] for name in ("parameters", "optimizer_states")) for meter in (ours, theirs)]
    assert kept[0] - kept[1] == pytest.approx(2 * shard, rel=0.01)
    assert theirs.live["gradients"] == pytest.approx(4 * shard, rel=0.01)


def test_what_waits_for_the_losses_backward_raises_that_phase_alone() -> None:
    step, waiting = walk_step(SPEC), walk_step(SPEC, waiting=10**9)
    assert waiting.meter.peak > step.meter.peak + 0.9 * 10**9
    assert waiting.meter.total == step.meter.total


def test_a_cuda_prediction_says_what_is_reserved_and_why() -> None:
    result = predict(SPEC)
    reserved = [row for row in result.ledger or [] if row.category == "reserved"]
    assert all(row.formula and row.source for row in reserved)
    step = walk_step(SPEC)
    expected = step.meter.main_peak + sum(row.bytes for row in reserved)
    assert result.memory.device_reserved_bytes == pytest.approx(expected, abs=2)
    assert (result.memory.device_reserved_bytes or 0) > (result.memory.device_peak_bytes or 0)


@pytest.mark.parametrize("change", [{"gpu": None, "device": "cpu"}, {"sharding": "none"}], ids=["cpu", "no zero-3"])
def test_no_reserved_figure_where_none_is_known(change: dict[str, object]) -> None:
    result = predict(RunSpec.model_validate(SPEC.model_dump() | change))
    assert result.memory.device_reserved_bytes is None
    assert not [row for row in result.ledger or [] if row.category == "reserved"]


def test_a_step_that_fits_only_by_giving_memory_back_says_so() -> None:
    """Qwen3-32B over 8 ranks: alive at once it fits into 80 GiB, with the pools and gaps it does not."""
    spec = RunSpec(
        model="qwen3-32b",
        seq=4096,
        micro_batch=1,
        checkpointing="per-layer",
        sharding="zero-3",
        world_size=8,
        gpu="h100",
    )
    tight, easy = predict(spec), predict(spec.model_copy(update={"gpu": "h200"}))
    assert tight.fits is not None
    assert tight.fits.fits
    assert [warning for warning in tight.warnings if "gives cached memory back" in warning]
    assert not [warning for warning in easy.warnings if "gives cached memory back" in warning]


@pytest.mark.parametrize("policy", ["none", "per-layer", "every-8", "every-3"])
def test_blocks_that_are_not_visited_count_like_those_that_are(policy: str) -> None:
    """A deep model is walked by skipping equal blocks: after the step nothing is left but what lives between steps and
    the sharded gradients."""
    spec = SPEC.model_copy(update={"checkpointing": policy, "model": "llama:24,64,4,2,176,192"})
    meter = walk_step(spec, replace(OURS, staying=1)).meter
    parameters = predict(spec).parameters or 0
    assert meter.live["activations"] == 4  # the loss
    assert meter.live["gradients"] == pytest.approx(2 * parameters / spec.world_size, rel=0.01)
    assert meter.live["parameters"] == pytest.approx(2 * parameters / spec.world_size, rel=0.15)
