"""Flash attention by hand: a small causal attention computed tile by tile with the running maximum and sum.

Milakov and Gimelshein 2018 (arXiv 1805.02867) for the online softmax; Dao et al. 2022 (arXiv 2205.14135), algorithm 1.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

Matrix = list[list[float]]


@dataclass(frozen=True, slots=True)
class Tile:
    """The state after one tile of keys has met one block of queries.

    `scores[r][c]` is None where the causal mask hides it; `rescale` is what the old sums were multiplied by.
    """

    first_query: int
    first_key: int
    scores: tuple[tuple[float | None, ...], ...]
    weights: tuple[tuple[float, ...], ...]
    maximum: tuple[float, ...]
    rescale: tuple[float, ...]
    total: tuple[float, ...]
    output: tuple[tuple[float, ...], ...]
    """Not yet divided by `total`."""
    last: bool
    """The last tile of its query block: output / total is the answer."""


@dataclass(frozen=True)
class Walk:
    queries: Matrix
    keys: Matrix
    values: Matrix
    tiles: list[Tile]
    output: Matrix
    """Attention of every query."""
    log_sum_exp: list[float]
    largest_tile: int
    """Scores alive at once; the whole matrix would be S²."""


def random_inputs(tokens: int, width: int, seed: int) -> tuple[Matrix, Matrix, Matrix]:
    """Queries, keys and values of one head, each (tokens, width), with two decimals so that they can be checked."""
    source = random.Random(seed)

    def matrix() -> Matrix:
        return [[round(source.uniform(-2, 2), 2) for _ in range(width)] for _ in range(tokens)]

    return matrix(), matrix(), matrix()


def walk_tiles(queries: Matrix, keys: Matrix, values: Matrix, block: int) -> Walk:
    """Causal attention by tiles of `block` queries and `block` keys; tiles above the diagonal are skipped."""
    tokens, width = len(queries), len(queries[0])
    tiles: list[Tile] = []
    output: Matrix = []
    log_sum_exp: list[float] = []
    for first_query in range(0, tokens, block):
        rows = range(first_query, min(first_query + block, tokens))
        maximum, total = [-math.inf] * len(rows), [0.0] * len(rows)
        mixed = [[0.0] * width for _ in rows]
        starts = range(0, rows[-1] + 1, block)
        for first_key in starts:
            columns = range(first_key, min(first_key + block, tokens))
            scores = [[_score(queries[q], keys[k]) if k <= q else None for k in columns] for q in rows]
            rescale, weights = [], []
            for row, line in enumerate(scores):
                seen = [score for score in line if score is not None]
                larger = max([maximum[row], *seen])
                factor = math.exp(maximum[row] - larger) if maximum[row] > -math.inf else 0.0
                shares = [0.0 if score is None else math.exp(score - larger) for score in line]
                maximum[row], total[row] = larger, total[row] * factor + sum(shares)
                mixed[row] = [
                    mixed[row][c] * factor + sum(share * values[k][c] for share, k in zip(shares, columns, strict=True))
                    for c in range(width)
                ]
                rescale.append(factor)
                weights.append(tuple(shares))
            tiles.append(
                Tile(
                    first_query, first_key, tuple(map(tuple, scores)), tuple(weights), tuple(maximum), tuple(rescale),
                    tuple(total), tuple(map(tuple, mixed)), last=first_key == starts[-1],
                )
            )  # fmt: skip
        output += [[x / total[row] for x in mixed[row]] for row in range(len(rows))]
        log_sum_exp += [maximum[row] + math.log(total[row]) for row in range(len(rows))]
    return Walk(queries, keys, values, tiles, output, log_sum_exp, min(block, tokens) ** 2)


def whole_softmax(queries: Matrix, keys: Matrix, values: Matrix) -> Matrix:
    """The same attention with every row of scores at once: what the tiles must agree with."""
    output: Matrix = []
    for q, query in enumerate(queries):
        scores = [_score(query, key) for key in keys[: q + 1]]
        top = max(scores)
        weights = [math.exp(score - top) for score in scores]
        mixed = [sum(w * value[c] for w, value in zip(weights, values, strict=False)) for c in range(len(query))]
        output.append([x / sum(weights) for x in mixed])
    return output


def _score(query: list[float], key: list[float]) -> float:
    """q·k / √width."""
    return sum(x * y for x, y in zip(query, key, strict=True)) / math.sqrt(len(query))
