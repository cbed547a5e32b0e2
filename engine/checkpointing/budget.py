"""`budget-F`: the fastest plan that keeps at most F of what `none` keeps between forward and backward. Torch-free.

Each block keeps everything, recomputes some op groups, or is recomputed whole: a knapsack with one choice a block,
solved exactly as a mixed-integer program (HiGHS) over *kinds* of blocks, whose equal blocks are interchangeable. Where
even recomputing every block whole keeps too much, inputs have to go too, and blocks run more than once:
`engine.checkpointing.chain`. Either way, what is alive in backward beside the budget is one block's inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from engine.checkpointing.chain import Chain, solve_chain
from engine.checkpointing.tree import Keep, Node, Region, Selective, Tree, describe
from engine.checkpointing.worth import groups_in, seconds_of, worth
from engine.closed_form.hardware import Rates
from engine.closed_form.tape import Tape, total_bytes
from engine.errors import UnsupportedError
from engine.units import format_bytes

SOLVER_SECONDS = 1.5
TIE = 1e-7
"""Weight of bytes beside seconds (both as shares): between equally fast plans, the smaller one."""


@dataclass(frozen=True, slots=True)
class Option:
    """What a block may do. `groups`: () keeps everything, None recomputes the block whole."""

    groups: tuple[str, ...] | None
    kept_bytes: int
    seconds: float

    def node(self, block: int) -> Node:
        if self.groups is None:
            return Region((Keep(block),))
        return Selective(block, self.groups) if self.groups else Keep(block)


@dataclass(frozen=True, slots=True)
class Profile:
    """A model's blocks as tapes (equal blocks share one), and what is kept outside them: whatever the plan, and only
    where something is recomputed (a mask that every block reads)."""

    tapes: tuple[Tape, ...]
    outside_bytes: int
    shared_bytes: int = 0

    @property
    def none_bytes(self) -> int:
        return self.outside_bytes + sum(total_bytes(tape.saved.values()) for tape in self.tapes)


@dataclass(frozen=True, slots=True)
class Plan:
    tree: Tree
    kept_bytes: int
    """Predicted saved activations, those outside the blocks included."""
    budget_bytes: int
    recompute_seconds: float
    gap: float
    """How much less recomputation a better plan could need at most, as a share of this one's."""
    solver: str

    def __str__(self) -> str:
        return (
            f"{describe(self.tree)}; keeps {format_bytes(self.kept_bytes)} of {format_bytes(self.budget_bytes)} "
            f"allowed ({self.solver}, optimality gap {self.gap:.2%})"
        )


def block_options(tape: Tape, card: Rates) -> tuple[Option, ...]:
    """The options of a block that no other beats in both bytes and seconds, most bytes first."""
    whole = tape.ops[: tape.last_saving_op + 1]
    found = [Option(None, input_bytes(tape), seconds_of(tape, whole, card))]
    present, all_bytes = groups_in(tape), total_bytes(tape.saved.values())
    for size in range(len(present) + 1):
        for groups in combinations(present, size):
            price = worth(tape, groups, card)
            found.append(Option(groups, all_bytes - price.saved_bytes, price.seconds))
    best: list[Option] = []
    for option in sorted(found, key=lambda o: (o.seconds, o.kept_bytes, len(o.groups or ()))):
        if not best or option.kept_bytes < best[-1].kept_bytes:
            best.append(option)
    return tuple(best)


def input_bytes(tape: Tape) -> int:
    return total_bytes(tensor for tensor in tape.inputs.values() if not tensor.parameter)


def spare_bytes(profile: Profile, fraction: float) -> int:
    """What blocks may keep. Raises UnsupportedError if no plan keeps so little, with the least fraction that one does;
    which plan, it takes a solver to say."""
    outside, first = profile.outside_bytes + profile.shared_bytes, input_bytes(profile.tapes[0])
    spare = int(fraction * profile.none_bytes) - outside
    if spare < first:
        least = (outside + first) / profile.none_bytes
        raise UnsupportedError(
            "checkpointing",
            f"budget-{fraction:g} is below what any plan keeps: {least:.3f} of none's activations is outside the blocks"
            " or the first block's input",
        )
    return spare


def plan_budget(profile: Profile, fraction: float, card: Rates) -> Plan:
    """Raises UnsupportedError as `spare_bytes` does, or where the solver cannot search so many blocks."""
    spare, inputs = spare_bytes(profile, fraction), [input_bytes(tape) for tape in profile.tapes]
    outside = profile.outside_bytes + profile.shared_bytes
    allowed = outside + spare
    if spare < sum(inputs):
        return _nested_plan(profile, inputs, spare, allowed, card)
    options = {key: block_options(tape, card) for key, tape in _distinct(profile.tapes).items()}
    chosen, gap = choose([options[id(tape)] for tape in profile.tapes], spare)
    return Plan(
        tree=tuple(option.node(block) for block, option in enumerate(chosen)),
        kept_bytes=outside + sum(option.kept_bytes for option in chosen),
        budget_bytes=allowed,
        recompute_seconds=sum(option.seconds for option in chosen),
        gap=gap,
        solver="mixed-integer program",
    )


def _nested_plan(profile: Profile, inputs: Sequence[int], spare: int, allowed: int, card: Rates) -> Plan:
    distinct = _distinct(profile.tapes)
    whole = {key: seconds_of(tape, tape.ops, card) for key, tape in distinct.items()}
    stopped = {key: seconds_of(tape, tape.ops[: tape.last_saving_op + 1], card) for key, tape in distinct.items()}
    seconds = tuple(whole[id(tape)] for tape in profile.tapes)
    tails = tuple(whole[id(tape)] - stopped[id(tape)] for tape in profile.tapes)
    nesting = solve_chain(Chain(tuple(inputs), seconds, tails), spare)
    assert nesting is not None  # the first input fits: checked by the caller
    return Plan(
        tree=nesting.tree,
        kept_bytes=allowed - spare + sum(inputs[first] for first in _firsts(nesting.tree)),
        budget_bytes=allowed,
        recompute_seconds=nesting.seconds,
        gap=1 - nesting.bound_seconds / nesting.seconds,
        solver="dynamic program over the chain",
    )


def _distinct(tapes: Sequence[Tape]) -> dict[int, Tape]:
    """Equal blocks share a tape: each by its identity, once."""
    return {id(tape): tape for tape in tapes}


def _firsts(tree: Sequence[Node]) -> list[int]:
    """The first block of each top-level region."""
    firsts = []
    for node in tree:
        while isinstance(node, Region):
            node = node.inside[0]
        firsts.append(node.block)
    return firsts


def choose(blocks: Sequence[tuple[Option, ...]], budget_bytes: int) -> tuple[list[Option], float]:
    """One option a block within the budget at least seconds, and the solver's optimality gap.

    `blocks[i]` are block i's options; the ones that keep least must fit together. Of equal blocks, the early ones keep
    least: the late ones' backward comes first.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # 50 MiB that only a budget plan needs

    kinds = Counter(blocks)
    pairs = [(kind, option) for kind in kinds for option in kind]
    longest = sum(max(option.seconds for option in kind) * count for kind, count in kinds.items()) or 1.0
    seconds = np.array([option.seconds / longest + TIE * option.kept_bytes / budget_bytes for _, option in pairs])
    one_each = np.array([[float(kind is owner) for owner, _ in pairs] for kind in kinds])
    sizes = np.array([[option.kept_bytes / budget_bytes for _, option in pairs]])
    counts, limit = list(kinds.values()), 1.0
    for _ in range(3):  # the solver's tolerance may let a few bytes too many through: ask again for fewer
        solution = milp(
            seconds,
            integrality=np.ones(len(pairs)),
            bounds=Bounds(0, np.inf),
            constraints=[LinearConstraint(one_each, counts, counts), LinearConstraint(sizes, -np.inf, limit)],
            options={"time_limit": SOLVER_SECONDS, "mip_rel_gap": 0.0},
        )
        assert solution.x is not None, solution.message  # the smallest options fit
        chosen = _assign(blocks, dict(zip(pairs, np.rint(solution.x).astype(int), strict=True)))
        if sum(option.kept_bytes for option in chosen) <= budget_bytes:
            return chosen, float(solution.mip_gap or 0.0)
        limit -= 1e-6
    raise AssertionError("the solver does not keep to the budget")


def _assign(
    blocks: Sequence[tuple[Option, ...]], amounts: dict[tuple[tuple[Option, ...], Option], int]
) -> list[Option]:
    left = dict(amounts)
    chosen = []
    for kind in blocks:
        option = next(option for option in reversed(kind) if left[kind, option] > 0)
        left[kind, option] -= 1
        chosen.append(option)
    return chosen
