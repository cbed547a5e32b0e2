"""Plans: what groups are worth, budgets, nested schedules. No model runs here."""

import math
import subprocess
import sys
import time
from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpointing.budget import Option, Profile, block_options, choose, plan_budget
from engine.checkpointing.chain import Chain, solve_chain
from engine.checkpointing.tree import Keep, Region, describe, leaves, nested, segments
from engine.checkpointing.worth import CPU_RATES, advice, default_groups, groups_in, op_worth, plan_rates, worth
from engine.closed_form import predict
from engine.closed_form.block import block_tape
from engine.closed_form.ops import context_of
from engine.closed_form.tape import total_bytes
from engine.errors import UnsupportedError
from engine.spec import RunSpec


def spec_of(**fields: object) -> RunSpec:
    base = {"model": "gpt:12,512,8", "micro_batch": 2, "seq": 1024, "precision": "fp32", "device": "cpu"}
    return RunSpec.model_validate(base | {"attention": "standard"} | fields)


def profile_of(spec: RunSpec, layers: int | None = None) -> Profile:
    tape = block_tape(context_of(spec))
    blocks = spec.architecture.layers
    saved = predict(spec).memory.saved_activation_bytes
    assert saved is not None
    return Profile((tape,) * (layers or blocks), saved - blocks * total_bytes(tape.saved.values()))


def test_the_planning_half_never_imports_torch() -> None:
    code = (
        "import sys; import engine.checkpointing.budget, engine.checkpointing.worth; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 12, 96])
def test_trees_hold_every_block_once_in_order(layers: int) -> None:
    for tree in (nested(layers), segments(layers, 3)):
        assert list(leaves(tree)) == list(range(layers))


@pytest.mark.parametrize("layers", [1, 2, 5, 16, 96])
def test_nested_keeps_logarithmically_many_inputs_and_runs_each_block_logarithmically_often(layers: int) -> None:
    tree = nested(layers)
    levels = math.ceil(math.log2(layers)) + 1 if layers > 1 else 1

    def deepest(nodes: tuple[object, ...], depth: int = 0) -> int:
        return max(deepest(n.inside, depth + 1) if isinstance(n, Region) else depth for n in nodes)

    assert len(tree) <= levels
    assert deepest(tree) <= levels


def test_a_tree_is_described_in_words() -> None:
    assert describe(segments(4, 1)) == "blocks 0-3 recompute each"
    assert describe(segments(5, 2)) == "blocks 0-3 2 × (2); 4 recompute each"
    assert describe((Keep(0), Keep(1))) == "blocks 0-1 keep all"


def test_the_default_of_selective_frees_half_of_a_block_at_best_value() -> None:
    for attention in ("standard", "flash"):
        spec = spec_of(attention=attention)
        tape = block_tape(context_of(spec))
        chosen = worth(tape, default_groups(spec), CPU_RATES)
        assert chosen.saved_bytes >= total_bytes(tape.saved.values()) / 2
        left = [row for row in op_worth(spec) if row.groups[0] not in chosen.groups]
        taken = [row for row in op_worth(spec) if row.groups[0] in chosen.groups]
        assert min(row.bytes_per_second for row in taken) > max(row.bytes_per_second for row in left)
    assert "attention-core" in default_groups(spec_of())
    assert "attention-core" not in default_groups(spec_of(attention="flash"))


def test_whose_advice_wins_depends_on_the_scores() -> None:
    """Materialised scores: Korthikanti's. A fused kernel has none to drop: the notes'."""
    standard, flash = advice(spec_of(seq=2048)), advice(spec_of(seq=2048, attention="flash"))
    assert standard["korthikanti"].bytes_per_second > standard["notes"].bytes_per_second
    assert flash["korthikanti"].bytes_per_second < flash["notes"].bytes_per_second


def test_a_plan_for_a_gpu_goes_by_its_rates() -> None:
    assert plan_rates(spec_of()) == CPU_RATES
    assert plan_rates(spec_of(gpu="h100-sxm")).matmul > 1e14
    assert plan_rates(spec_of(device="cuda")).matmul > 1e14


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_integer_program_is_optimal_and_keeps_to_the_budget(data: st.DataObject) -> None:
    options = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), min_size=1, max_size=3, unique=True)
    kinds = data.draw(st.lists(options, min_size=1, max_size=3))
    blocks = [
        tuple(
            Option(("norms",), kept, float(seconds))
            for kept, seconds in kinds[data.draw(st.integers(0, len(kinds) - 1))]
        )
        for _ in range(data.draw(st.integers(1, 5)))
    ]
    least = sum(min(option.kept_bytes for option in kind) for kind in blocks)
    budget = least + data.draw(st.integers(0, 60))
    chosen, gap = choose(blocks, budget)
    assert all(option in kind for option, kind in zip(chosen, blocks, strict=True))
    assert sum(option.kept_bytes for option in chosen) <= budget
    feasible = [combo for combo in product(*blocks) if sum(o.kept_bytes for o in combo) <= budget]
    best = min(sum(option.seconds for option in combo) for combo in feasible)
    assert sum(option.seconds for option in chosen) == pytest.approx(best)
    assert gap <= 1e-6


def brute_force(chain: Chain, budget: int) -> float:
    """The recurrence of `engine.checkpointing.chain`, in bytes, by plain recursion."""

    def run(s: int, i: int) -> float:
        return sum(chain.seconds[s:i]) - chain.tails[i - 1]

    @cache
    def inside(s: int, t: int, memory: int) -> float:
        if memory < 0:
            return math.inf
        if s == t:
            return 0.0
        ways = [run(s, i) + inside(s, i - 1, memory) + inside(i, t, memory - chain.inputs[i]) for i in range(s + 1, t)]
        return min([*ways, run(s, t) + inside(s, t - 1, memory)])

    @cache
    def top(s: int, memory: int) -> float:
        last = len(chain.inputs)
        if memory < 0:
            return math.inf
        whole = run(s, last) + inside(s, last - 1, memory)
        ways = [run(s, i) + inside(s, i - 1, memory) + top(i, memory - chain.inputs[i]) for i in range(s + 1, last)]
        return min([whole, *ways])

    return top(0, budget - chain.inputs[0])


def replayed(chain: Chain, nodes: tuple[Keep | Region, ...]) -> float:
    """Seconds of recomputation that a tree takes: each region runs its blocks once, then what is inside of it."""
    total = 0.0
    for node in nodes:
        if isinstance(node, Region):
            blocks = list(leaves((node,)))
            total += sum(chain.seconds[block] for block in blocks) - chain.tails[blocks[-1]]
            total += replayed(chain, node.inside)
    return total


@settings(max_examples=25, deadline=None)
@given(
    blocks=st.lists(st.tuples(st.integers(1, 9), st.integers(2, 9)), min_size=1, max_size=7),
    spare=st.integers(0, 40),
)
def test_the_chain_program_is_optimal(blocks: list[tuple[int, int]], spare: int) -> None:
    chain = Chain(tuple(b for b, _ in blocks), tuple(float(s) for _, s in blocks), (1.0,) * len(blocks))
    budget = blocks[0][0] + spare
    nesting = solve_chain(chain, budget)
    assert nesting is not None
    assert nesting.seconds == pytest.approx(brute_force(chain, budget))
    assert replayed(chain, nesting.tree) == pytest.approx(nesting.seconds)
    assert nesting.bound_seconds <= nesting.seconds + 1e-9
    assert list(leaves(nesting.tree)) == list(range(len(blocks)))


def test_a_chain_whose_first_input_does_not_fit_has_no_schedule() -> None:
    assert solve_chain(Chain((5, 5), (1.0, 1.0), (0.1, 0.1)), 4) is None


def test_budgets_are_kept_monotone_and_deterministic() -> None:
    profile = profile_of(spec_of(attention="flash"))
    fractions = (0.04, 0.06, 0.1, 0.25, 0.5, 0.75, 0.99)
    plans = [plan_budget(profile, fraction, CPU_RATES) for fraction in fractions]
    for fraction, plan in zip(fractions, plans, strict=True):
        assert plan.kept_bytes <= plan.budget_bytes <= fraction * profile.none_bytes
        assert list(leaves(plan.tree)) == list(range(12))
        assert 0 <= plan.gap < 1
        assert plan == plan_budget(profile, fraction, CPU_RATES)
    seconds = [plan.recompute_seconds for plan in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert "dynamic program" in plans[0].solver
    assert "integer program" in plans[-1].solver


def test_a_budget_that_nothing_keeps_to_names_the_least() -> None:
    with pytest.raises(UnsupportedError, match=r"0\.0\d+ of none's activations is outside the blocks"):
        plan_budget(profile_of(spec_of()), 0.001, CPU_RATES)


@pytest.mark.parametrize("fraction", [0.5, 0.03, 0.01])
def test_a_chain_of_96_blocks_is_planned_in_under_two_seconds(fraction: float) -> None:
    profile = profile_of(spec_of(attention="flash"), layers=96)
    started = time.process_time()
    plan = plan_budget(profile, fraction, CPU_RATES)
    assert time.process_time() - started < 2
    assert plan.kept_bytes <= fraction * profile.none_bytes


def test_many_equal_blocks_are_planned_as_fast_as_a_few() -> None:
    profile = profile_of(spec_of(attention="flash"), layers=4000)
    started = time.process_time()
    assert plan_budget(profile, 0.5, CPU_RATES).kept_bytes <= 0.5 * profile.none_bytes
    assert time.process_time() - started < 1


@pytest.mark.parametrize("slots", [1, 40, 4000])
def test_a_chain_too_long_to_search_is_refused_at_once(slots: int) -> None:
    with pytest.raises(UnsupportedError, match="nesting 4000 blocks is too much to search"):
        solve_chain(Chain((10,) * 4000, (1.0,) * 4000, (0.1,) * 4000), 10 * slots)


def test_options_are_the_frontier_of_every_set_of_groups() -> None:
    tape = block_tape(context_of(spec_of()))
    options = block_options(tape, CPU_RATES)
    assert options[0].groups == ()
    assert [o.kept_bytes for o in options] == sorted((o.kept_bytes for o in options), reverse=True)
    assert [o.seconds for o in options] == sorted(o.seconds for o in options)
    for group in groups_in(tape):
        price = worth(tape, (group,), CPU_RATES)
        kept = total_bytes(tape.saved.values()) - price.saved_bytes
        assert any(o.kept_bytes <= kept and o.seconds <= price.seconds + 1e-12 for o in options)
