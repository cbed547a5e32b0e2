"""What a set of predictions is worth: median, p90, worst, bias, and how often they are too low."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

TOO_LOW = 0.03
"""A prediction this far under the truth is one that ends in an out-of-memory error."""

OUTLIER = 0.20


@dataclass(frozen=True, slots=True)
class Comparison:
    """One predicted quantity against the true one, in its unit. `row` is the published row's index, if it is one."""

    label: str
    group: str
    predicted: float
    actual: float
    row: int | None = None

    @property
    def error(self) -> float:
        """Signed, relative to the truth: negative is too low."""
        return self.predicted / self.actual - 1


@dataclass(frozen=True, slots=True)
class Summary:
    count: int
    median_error: float
    p90_error: float
    worst_error: float
    bias: float
    """Median of the signed errors."""
    under_estimate_rate: float
    """Share predicted more than 3 % too low."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def quantile(values: Sequence[float], share: float) -> float:
    """Of at least one value: the one that `share` of them do not exceed, interpolated between neighbours."""
    ordered = sorted(values)
    below, part = divmod(share * (len(ordered) - 1), 1)
    upper = ordered[min(int(below) + 1, len(ordered) - 1)]
    return ordered[int(below)] + part * (upper - ordered[int(below)])


def summarise(comparisons: Sequence[Comparison]) -> Summary | None:
    """None of nothing."""
    if not comparisons:
        return None
    signed = [comparison.error for comparison in comparisons]
    sizes = sorted(map(abs, signed))
    return Summary(
        count=len(sizes),
        median_error=statistics.median(sizes),
        p90_error=sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        worst_error=sizes[-1],
        bias=statistics.median(signed),
        under_estimate_rate=sum(error < -TOO_LOW for error in signed) / len(signed),
    )


def outliers(comparisons: Sequence[Comparison]) -> list[Comparison]:
    return [comparison for comparison in comparisons if abs(comparison.error) > OUTLIER]
