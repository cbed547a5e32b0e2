import pytest

from engine.closed_form.training import schedule_of
from engine.exercises.replay import replay
from engine.spec import RunSpec


def frames(checkpointing, layers=9):
    return replay(schedule_of(RunSpec(model=f"gpt:{layers},64,4", checkpointing=checkpointing)))


@pytest.mark.parametrize("checkpointing", ["none", "per-layer", "every-2", "sqrt", "nested"])
@pytest.mark.parametrize("layers", [1, 2, 7, 9])
def test_forward_goes_up_backward_comes_down_and_nothing_is_left(checkpointing, layers):
    played = frames(checkpointing, layers)
    assert [f.block for f in played if f.action == "forward"] == list(range(layers))
    assert [f.block for f in played if f.action == "backward"] == list(reversed(range(layers)))
    last = played[-1]
    assert (last.block, last.inside) == (0, (0,))
    assert set(last.inputs) <= {0}


@pytest.mark.parametrize("checkpointing", ["none", "per-layer", "sqrt", "nested"])
def test_a_block_is_alive_when_it_runs_backward(checkpointing):
    assert all(f.block in f.inside for f in frames(checkpointing) if f.action == "backward")


def test_peaks_by_hand():
    """9 layers, a = 16·b. none: 9·16. per-layer: 9 inputs, of which the last is inside its layer: 8 + 16. sqrt, k = 3:
    three inputs, one inside the segment: 2 + 3·16."""
    peaks = {kind: max(f.alive_bytes(1, 16) for f in frames(kind)) for kind in ("none", "per-layer", "sqrt")}
    assert peaks == {"none": 144, "per-layer": 24, "sqrt": 50}


def test_recomputed_layers():
    """One extra forward for every policy of one level; nested pays about log L of them."""
    again = {k: sum(f.action == "recompute" for f in frames(k)) for k in ("none", "per-layer", "sqrt", "nested")}
    assert (again["none"], again["per-layer"], again["sqrt"]) == (0, 9, 9)
    assert 9 < again["nested"] < 9 * 4
