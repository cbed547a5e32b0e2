"""Each exercise's default answers, derived by hand. B·S·d = batch · sequence · hidden, f = FFN width, H = heads."""

from math import sqrt

import pytest

from engine.exercises import EXERCISES, solve
from engine.exercises.selective import cost


def test_activations_of_llama_13b():
    """B=4 S=4096 d=5120 f=13824 H=40 L=40 V=32000, bf16, flash.

    A layer keeps x, norm, q, k, v, attention output, x_middle, norm: 8 tensors of 2·B·S·d; gate, silu, up, product:
    4 of 2·B·S·f; the fp32 log-sum-exp 4·B·S·H; two fp32 root mean squares 8·B·S:
        B·S·(16·d + 8·f + 4·H + 8) = 16384 · 192680 = 3 156 869 120.
    Outside the blocks: final norm's input 2·B·S·d and root mean square 4·B·S, the loss's gradients of the hidden states
    2·B·S·d and of the head 2·V·d, the tokens 8·B·S, the loss 4:
        335 544 320 + 65 536 + 327 680 000 + 131 072 + 4 = 663 420 932.
    """
    layer = 16384 * (16 * 5120 + 8 * 13824 + 4 * 40 + 8)
    outside = 663_420_932
    answers = solve(1, {}).answers
    assert answers["no_checkpointing_bytes"] == 40 * layer + outside == 126_938_185_732
    assert answers["per_layer_bytes"] == 40 * 2 * 16384 * 5120 + outside == 7_374_307_332
    assert answers["ratio"] == pytest.approx(17.2136, rel=1e-4)


def test_standard_attention_adds_one_softmax_a_layer():
    """2·B·H·S² for the softmax, less the log-sum-exp 4·B·H·S that only the fused kernel keeps."""
    flash, standard = (
        solve(1, {"attention": kind}).answers["no_checkpointing_bytes"] for kind in ("flash", "standard")
    )
    assert standard - flash == 40 * (2 * 4 * 40 * 4096**2 - 4 * 4 * 40 * 4096)


def test_optimal_interval_of_a_gpt_block():
    """B=4 S=1024 d=1024 H=16 L=64, bf16: b = 2·B·S·d = 8 388 608.

    A block keeps 8 tensors of the stream's size, 2 of four times it: 16·b; two means and deviations 4·2·B·S and the
    log-sum-exp 4·B·H·S: a = 134 217 728 + 32 768 + 262 144 = 134 512 640, so k* = √(64·b/a) = 1.9978. By the formula
    k = 2 needs 32·b + 2·a = 537 460 736; the predictor adds the gradients in flight in one block, under a tenth.
    """
    answers = solve(2, {}).answers
    assert answers["sqrt_k"] == 8
    assert answers["exact_k"] == pytest.approx(sqrt(64 * 8_388_608 / 134_512_640))
    assert answers["discrete_k"] == 2
    assert 537_460_736 < answers["minimum_bytes"] < 1.1 * 537_460_736


def test_equal_sizes_give_the_square_root_rule():
    """With a = b, peak(k) = (L/k + k)·b: k = √L, and 2·√L·b."""
    answers = solve(2, {"layers": "64", "ratio": "1"}).answers
    assert answers["exact_k"] == answers["sqrt_k"] == answers["discrete_k"] == 8
    assert answers["minimum_bytes"] == 16 * 8_388_608


def test_offload_of_70b():
    """LLaMA-2-70B: 80·(2·8192² + 2·8192·1024 + 3·8192·28672 + 2·8192) + 2·32000·8192 + 8192 = 68 976 648 192
    parameters, 2 bytes each way: 137 953 296 384. At 64 GB/s: 4.3110 s serially, 2.1555 s in full duplex."""
    answers = solve(3, {}).answers
    block = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    parameters = 80 * block + 2 * 32000 * 8192 + 8192
    assert answers["down_bytes"] == answers["up_bytes"] == 2 * parameters == 137_953_296_384
    assert answers["serial_seconds"] == pytest.approx(4.31104, rel=1e-5)
    assert answers["duplex_seconds"] == pytest.approx(2.15552, rel=1e-5)


def test_seven_billion_at_8192():
    """LLaMA-2-7B, N = 6 738 415 616, bf16-mixed, B=1 S=8192 d=4096 f=11008 H=32 L=32.

    (a) While forward ends there are weights and states, 14·N = 94.34 GB, and in each layer
    B·S·(16·d + 8·f + 8) + 2·B·H·S² = 5 553 324 032, in all 177.7 GB: 272.0 GB, and a few scores in flight.
    (b) In the last of backward 16·N = 107.81 GB and the activations of about one layer.
    """
    parameters = 6_738_415_616
    layer = 8192 * (16 * 4096 + 8 * 11008 + 8) + 2 * 32 * 8192**2
    answers = solve(4, {}).answers
    assert answers["standard_none_bytes"] == pytest.approx(14 * parameters + 32 * layer, rel=0.05)
    assert answers["flash_checkpointed_bytes"] == pytest.approx(16 * parameters, rel=0.02)
    assert answers["ratio"] == answers["standard_none_bytes"] / answers["flash_checkpointed_bytes"]


def test_selective_strategy_of_a_gpt():
    """L=24 d=2048 H=16 B=4 S=2048, bf16, dropout, standard attention: recomputing norms, core and activation drops in
    each layer two norm outputs 4·B·S·d and their fp32 means and deviations 16·B·S, the softmax 2·B·H·S², and the GELU's
    output 8·B·S·d: 67 108 864 + 131 072 + 536 870 912 + 134 217 728 = 738 328 576."""
    answers = solve(5, {}).answers
    assert answers["saved_bytes"] == 24 * 738_328_576 == 17_719_885_824
    assert 0 < answers["overhead_fraction"] < 0.33


def test_a_frontier_has_no_dominated_strategy():
    edge = solve(5, {"layers": "2"}).answers["frontier"]
    pairs = [(point["overhead_fraction"], point["saved_bytes"]) for point in edge]
    assert pairs == sorted(pairs)
    assert [saved for _, saved in pairs] == sorted({saved for _, saved in pairs})
    assert edge[0]["recompute"] == []


def test_flash_leaves_the_core_nothing_worth_recomputing():
    """The fused kernel keeps its output and a log-sum-exp; the projection behind it needs the output anyway."""
    inputs = EXERCISES[5].parse({"attention": "standard", "dropout": "0"})
    standard, flash = (cost({**inputs, "attention": kind}, ("attention-core",)) for kind in ("standard", "flash"))
    assert standard.saved_bytes > 5 * flash.saved_bytes


@pytest.mark.parametrize("number", EXERCISES)
def test_every_answer_is_asked_and_every_step_has_its_unit(number):
    solution = solve(number, {})
    assert set(solution.answers) == set(EXERCISES[number].asked)
    assert solution.steps
    assert all((step.value is None) == (step.unit is None) for step in solution.steps)
    assert set(solution.guesses) <= set(solution.answers)
