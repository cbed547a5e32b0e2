"""Nested recomputation of a chain within a memory budget, by dynamic programming. Torch-free.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova (2019, hal-02352969) give the optimal persistent schedule of a
heterogeneous chain: a kept input stays until its block's backward is done. With C(s, t, m) the least recomputation
that blocks s..t need once the input of s is there, and m bytes for further inputs:

    C(s, s, m) = 0
    C(s, t, m) = min over s < i ≤ t of  run(s, i) + C(s, i-1, m) + C(i, t, m - input(i))

run(s, i) runs blocks s..i-1 again. The input of a block whose backward follows at once is part of that block's
working set, which is not counted in m. At the top level the last block too is a region: its inside does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.checkpointing.tree import Keep, Region, Tree
from engine.errors import UnsupportedError

SLOTS = 256
"""Memory is counted in at most this many units; where every input is equal the unit is that input, and exact."""

MOST_STATES = 2**22
"""Of the table (s, t, m): about two seconds, and 75 MB. Few slots save no time below FEWEST_SLOTS."""
FEWEST_SLOTS = 32


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks in order: bytes of each one's input, seconds to run it, seconds of its last matmul (never repeated)."""

    inputs: tuple[int, ...]
    seconds: tuple[float, ...]
    tails: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Nesting:
    tree: Tree
    seconds: float
    """Recomputation of a step."""
    bound_seconds: float
    """No schedule of this kind takes less."""


def solve_chain(chain: Chain, budget_bytes: int) -> Nesting | None:
    """The least recomputation that never keeps more than `budget_bytes` of inputs; None if not even one fits.

    Raises UnsupportedError for a chain too long for the table.
    """
    spare = budget_bytes - chain.inputs[0]
    if spare < 0:
        return None
    unit = chain.inputs[0] if len(set(chain.inputs)) == 1 else max(1, spare // SLOTS)
    slots = min(spare // unit, len(chain.inputs) * (max(chain.inputs) // unit + 1))
    if len(chain.inputs) ** 2 * max(slots + 1, FEWEST_SLOTS) > MOST_STATES:
        raise UnsupportedError(
            "checkpointing",
            f"so small a budget nests blocks, and nesting {len(chain.inputs)} blocks is too much to search: "
            "use nested, sqrt or a larger budget",
        )
    rounded_up, rounded_down = [-(-size // unit) for size in chain.inputs], [size // unit for size in chain.inputs]
    safe = _Table(chain, rounded_up, slots)
    optimistic = safe if rounded_up == rounded_down else _Table(chain, rounded_down, slots)
    return Nesting(safe.tree(), safe.top[0][slots], optimistic.top[0][-1])


class _Table:
    """C for every (s, t, m), and the same for the top level."""

    def __init__(self, chain: Chain, sizes: Sequence[int], slots: int) -> None:
        self.count, self.sizes, self.slots, self.chain = len(sizes), sizes, slots, chain
        self.prefix = np.concatenate([[0.0], np.cumsum(chain.seconds)])
        shape = (self.count, self.count, slots + 1)
        self.cost: NDArray[np.float64] = np.zeros(shape)
        self.choice: NDArray[np.int16] = np.zeros(shape, dtype=np.int16)
        behind = np.full(shape, np.inf)  # [i, t]: C(i, t, m - input(i))
        for t in range(self.count):
            behind[t, t] = 0.0
            for s in range(t - 1, -1, -1):
                ways = self._run(s, t)[:, None] + self.cost[s, s:t] + behind[s + 1 : t + 1, t]
                self.choice[s, t] = ways.argmin(axis=0) + s + 1
                self.cost[s, t] = ways.min(axis=0)
                behind[s, t] = self._shifted(self.cost[s, t], sizes[s])
        self.top, self.top_choice = self._top()

    def _run(self, s: int, t: int) -> NDArray[np.float64]:
        """Seconds to run s..i-1 again, for i from s+1 to t."""
        stops = np.arange(s + 1, t + 1)
        seconds: NDArray[np.float64] = self.prefix[stops] - self.prefix[s] - np.asarray(self.chain.tails)[stops - 1]
        return seconds

    def _shifted(self, costs: NDArray[np.float64], size: int) -> NDArray[np.float64]:
        shifted = np.full(self.slots + 1, np.inf)
        if size <= self.slots:
            shifted[size:] = costs[: self.slots + 1 - size]
        return shifted

    def _top(self) -> tuple[list[NDArray[np.float64]], list[NDArray[np.int64]]]:
        """For each s: the rest s..L-1 as regions, the first of which ends before i (i = L: one region)."""
        last = self.count
        costs: list[NDArray[np.float64]] = [np.empty(0)] * last
        choices: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * last
        for s in range(last - 1, -1, -1):
            run = self._run(s, last)
            ways = [
                run[i - s - 1] + self.cost[s, i - 1] + (self._shifted(costs[i], self.sizes[i]) if i < last else 0.0)
                for i in range(s + 1, last + 1)
            ]
            costs[s], choices[s] = np.min(ways, axis=0), np.argmin(ways, axis=0) + s + 1
        return costs, choices

    def tree(self) -> Tree:
        regions: list[Region] = []
        s, memory = 0, self.slots
        while s < self.count:
            i = int(self.top_choice[s][memory])
            regions.append(Region(self._inside(s, i - 1, memory)))
            s = i
            if s < self.count:
                memory -= self.sizes[s]
        return tuple(regions)

    def _inside(self, s: int, t: int, memory: int) -> tuple[Keep | Region, ...]:
        if s == t:
            return (Keep(s),)
        i = int(self.choice[s, t, memory])
        rest = memory - self.sizes[i] if i < t else 0
        return (Region(self._inside(s, i - 1, memory)), *self._inside(i, t, rest))
