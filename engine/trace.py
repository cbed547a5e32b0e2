"""What was alive when: the one record from which every memory figure of a measured or simulated step is made.

A `Recorder` receives events in order (from the profiler of a real step, or from a fake-tensor dispatch mode) and
`finish` turns them into a `Trace`. Time is seconds for a real step and the event's number for a simulated one.

Categories follow from when a storage is born and dies, the same for every checkpoint policy and kernel:

- a gradient is what a parameter's `.grad` holds;
- an activation was born in forward and lives when forward ends, or was born while a block is recomputed in backward
  and lives when that recomputation ends;
- the rest is temporary. Parameters and optimizer states are alive before the step and counted apart.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, cast

from engine.result import CATEGORIES, AtPeak, Phase, Timeline

FOREVER = float("inf")
TIMELINE_POINTS = 600  # points a stored timeline keeps; each bucket keeps its extremes


@dataclass(slots=True)
class Storage:
    """One allocation of the device."""

    bytes: int
    born: float
    died: float = FOREVER
    category: str = "temporaries"
    where: str = ""


@dataclass(slots=True)
class Span:
    """A phase, or a block's run inside one."""

    name: str
    start: float
    end: float = FOREVER
    phase: str = ""


@dataclass(slots=True)
class Trace:
    """A finished step. `base` are the bytes alive before it by category."""

    storages: list[Storage]
    phases: list[Span]
    blocks: list[Span]
    base: dict[str, int]
    x_unit: Literal["seconds", "events"]
    _curve: list[tuple[float, int]] = field(default_factory=list)

    def curve(self) -> list[tuple[float, int]]:
        """(time, live bytes) after each event, base included."""
        if not self._curve:
            live = sum(self.base.values())
            for time, storage, sign in self.events():
                live += sign * storage.bytes
                self._curve.append((time, live))
        return self._curve

    def events(self) -> list[tuple[float, Storage, int]]:
        """(time, storage, +1 for its birth or -1 for its death), in order."""
        born = [(storage.born, storage, 1) for storage in self.storages]
        died = [(storage.died, storage, -1) for storage in self.storages if storage.died != FOREVER]
        return sorted(born + died, key=lambda event: (event[0], event[2]))

    def peak(self) -> tuple[float, int]:
        """(time, bytes) of the first instant with the most bytes alive."""
        start = (self.phases[0].start if self.phases else 0.0, sum(self.base.values()))
        return max([start, *self.curve()], key=lambda point: point[1])

    def alive(self, time: float) -> list[Storage]:
        """Storages alive just after `time`."""
        return [storage for storage in self.storages if storage.born <= time < storage.died]

    def at(self, time: float) -> AtPeak:
        """Bytes alive at `time` by category."""
        total = Counter(self.base)
        for storage in self.alive(time):
            total[storage.category] += storage.bytes
        return AtPeak(**{name: total[name] for name in CATEGORIES})

    def phase_at(self, time: float) -> Phase | None:
        """The phase running at `time`."""
        for span in self.phases:
            if span.start <= time <= span.end:
                return cast(Phase, span.name)  # the names that `Training.step` gives its phases
        return None

    def saved_bytes(self) -> int:
        """Bytes born in the first forward and alive when it ends: what backward needs, parameters excluded."""
        forward = next(span for span in self.phases if span.name == "forward")
        kept = (s for s in self.storages if forward.start <= s.born <= forward.end < s.died)
        return sum(storage.bytes for storage in kept if storage.category != "parameters")


class Recorder:
    """Collects events in order. Storages are named by any hashable key; a key may return after its storage died."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.live: dict[object, Storage] = {}
        self.phases: list[Span] = []
        self.blocks: list[Span] = []
        self.open_blocks: list[Span] = []
        self.recomputed: list[Span] = []

    def allocate(self, key: object, count: int, time: float) -> None:
        storage = Storage(count, time, where=self.open_blocks[-1].name if self.open_blocks else "")
        self.live[key] = storage
        self.storages.append(storage)

    def free(self, key: object, time: float) -> None:
        """Storages that were alive before the step are not the recorder's to free: they are ignored."""
        if storage := self.live.pop(key, None):
            storage.died = time

    def gradient(self, key: object) -> None:
        if storage := self.live.get(key):
            storage.category = "gradients"

    def parameter(self, key: object) -> None:
        """A parameter that is on the device only for a while."""
        if storage := self.live.get(key):
            storage.category = "parameters"

    def phase(self, name: str, time: float, enter: bool) -> None:
        if enter:
            self.phases.append(Span(name, time))
        else:
            self.phases[-1].end = time
            self._settle(time, self.phases[-1], name == "forward")

    def block(self, name: str, time: float, enter: bool) -> None:
        if enter:
            phase = self.phases[-1].name if self.phases else ""
            span = Span(name, time, phase="recompute" if phase == "backward" else phase)
            self.open_blocks.append(span)
            self.blocks.append(span)
        elif self.open_blocks:
            span = self.open_blocks.pop()
            span.end = time
            self._settle(time, span, span.phase == "recompute")

    def _settle(self, time: float, span: Span, keeps: bool) -> None:
        """What was born in `span` and still lives when it ends is kept for backward."""
        if keeps:
            for storage in self.live.values():
                if storage.born >= span.start and storage.category == "temporaries":
                    storage.category = "activations"

    def finish(self, base: dict[str, int], x_unit: Literal["seconds", "events"]) -> Trace:
        return Trace(self.storages, self.phases, self.blocks, base, x_unit)


def timeline(trace: Trace, points: int = TIMELINE_POINTS) -> Timeline:
    """The stacked curve by category, down-sampled so that each bucket keeps its lowest and highest instant."""
    curve = trace.curve()
    peak_time, _ = trace.peak()
    kept = sorted({curve[i][0] for i in _extremes([live for _, live in curve], points)} | {peak_time})
    origin = trace.phases[0].start if trace.phases else 0.0
    columns = _columns(trace, kept)
    phases = [{"name": s.name, "start": s.start - origin, "end": s.end - origin} for s in trace.phases]
    blocks = [
        {"name": s.name, "start": s.start - origin, "end": s.end - origin, "phase": s.phase}
        for s in trace.blocks
        if s.end != FOREVER
    ]
    return Timeline(
        x_unit=trace.x_unit, x=[time - origin for time in kept], **columns, phases=phases, blocks=blocks,
        peak_index=kept.index(peak_time), alive_at_peak=_largest(trace, peak_time),
    )  # fmt: skip


def _extremes(values: list[int], points: int) -> list[int]:
    """Indices of each bucket's minimum and maximum, first and last."""
    if len(values) <= points:
        return list(range(len(values)))
    width = -(-2 * len(values) // points)
    kept = {0, len(values) - 1}
    for start in range(0, len(values), width):
        bucket = range(start, min(start + width, len(values)))
        kept |= {min(bucket, key=values.__getitem__), max(bucket, key=values.__getitem__)}
    return sorted(kept)


def _columns(trace: Trace, times: list[float]) -> dict[str, list[int]]:
    """Live bytes by category just after each of `times` (sorted)."""
    columns: dict[str, list[int]] = {}
    for name in CATEGORIES:
        change = [0] * (len(times) + 1)
        for storage in trace.storages:
            if storage.category == name:
                change[bisect.bisect_left(times, storage.born)] += storage.bytes
                change[bisect.bisect_left(times, storage.died)] -= storage.bytes
        live, column = trace.base.get(name, 0), []
        for delta in change[:-1]:
            live += delta
            column.append(live)
        columns[name] = column
    return columns


def _largest(trace: Trace, time: float, rows: int = 12) -> list[dict[str, object]]:
    """The groups (where, category, size) that hold the most bytes at `time`."""
    groups: Counter[tuple[str, str, int]] = Counter()
    for storage in trace.alive(time):
        groups[(storage.where, storage.category, storage.bytes)] += 1
    ranked = sorted(groups.items(), key=lambda item: -item[0][2] * item[1])[:rows]
    return [
        {"bytes": size * count, "category": category, "count": count, "where": where or "outside the blocks"}
        for (where, category, size), count in ranked
    ]
