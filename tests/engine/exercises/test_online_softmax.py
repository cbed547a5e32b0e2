import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.exercises.online_softmax import random_inputs, walk_tiles, whole_softmax


@given(tokens=st.integers(1, 12), block=st.integers(1, 12), seed=st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_tiles_give_the_whole_softmax(tokens, block, seed):
    inputs = random_inputs(tokens, 3, seed)
    walk = walk_tiles(*inputs, block)
    for tiled, whole in zip(walk.output, whole_softmax(*inputs), strict=True):
        assert tiled == pytest.approx(whole, abs=1e-12)


def test_two_tokens_by_hand():
    """q = k = [1], [2], values 10 and 20, width 1. Second row: scores 2 and 4; after the first tile m = 2, l = 1; the
    second raises m to 4, so what was summed is scaled by e⁻²: l = e⁻² + 1, output (10·e⁻² + 20)/(e⁻² + 1)."""
    walk = walk_tiles([[1.0], [2.0]], [[1.0], [2.0]], [[10.0], [20.0]], 1)
    first, last = walk.tiles[1], walk.tiles[2]
    assert (first.maximum, first.total) == ((2.0,), (1.0,))
    assert (last.maximum, last.rescale) == ((4.0,), (math.exp(-2),))
    assert last.total == (math.exp(-2) + 1,)
    assert walk.output[1][0] == pytest.approx((10 * math.exp(-2) + 20) / (math.exp(-2) + 1))
    assert walk.log_sum_exp[1] == pytest.approx(math.log(math.exp(2) + math.exp(4)))


def test_tiles_above_the_diagonal_are_skipped():
    walk = walk_tiles(*random_inputs(8, 3, 0), 2)
    assert len(walk.tiles) == 4 + 3 + 2 + 1
    assert walk.largest_tile == 4
