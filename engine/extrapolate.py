"""The trace of a deep uniform model from the trace of a shallow one, exact to the storage. Torch-free.

A step on a stack of equal blocks repeats itself: each block's forward, backward and update is the block before's,
shifted by one (by `period` blocks where policies or layer types alternate). A recorded step is cut into windows, one
for each block and phase. A deeper step is written by repeating the middle windows, with every reference moved along:
"frees the third storage that this block's forward made". What is inferred is checked, not assumed: the step predicted
for the next depth must equal the one recorded there, storage by storage; otherwise `NotUniform` is raised.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from engine.trace import FOREVER, Span, Storage, Trace

Place = tuple[int, int | None, int, int]
"""Where a storage is born: section, block (None = outside the blocks), the how-manieth such window, ordinal in it."""


class NotUniform(Exception):
    """The blocks do not repeat themselves: the step has to be simulated at full depth."""


@dataclass(frozen=True, slots=True)
class BaseStorage:
    """A parameter, buffer or optimizer state that is alive before the step."""

    bytes: int
    category: str
    block: int | None


@dataclass(slots=True)
class Step:
    """One recorded step of a model with `blocks` blocks."""

    trace: Trace
    blocks: int
    base: list[BaseStorage]
    cuts: list[tuple[float, int | None]] = field(default_factory=list)
    """(time, block) at which backward or the optimizer turns to a block; None when it turns to what is outside."""
    flops: list[tuple[float, int, bool]] = field(default_factory=list)
    """(time, FLOPs, recomputed?) of each counted operator."""


@dataclass(frozen=True, slots=True)
class Event:
    """`+` birth, `-` death, `open` and `close` of a block's run, `flops`."""

    kind: str
    count: int = 0
    text: str = ""
    block: int | None = None
    place: Place | None = None

    def shifted(self, shift: int) -> Event:
        block = None if self.block is None else self.block + shift
        return replace(self, block=block, place=_moved(self.place, shift))


@dataclass(slots=True)
class Window:
    block: int | None
    events: list[Event] = field(default_factory=list)


@dataclass(slots=True)
class Section:
    """A phase of the step, or (without a name) what runs between two phases."""

    name: str
    windows: list[Window] = field(default_factory=list)


@dataclass(slots=True)
class Program:
    """A step without its clock: sections of windows of events."""

    sections: list[Section]
    base: list[BaseStorage]

    def flops(self, *, recomputed: bool) -> int:
        events = (e for section in self.sections for window in section.windows for e in window.events)
        return sum(e.count for e in events if e.kind == "flops" and (e.text == "recomputed") == recomputed)

    def trace(self) -> Trace:
        """The program run: time is the number of the event."""
        return _Run(self).trace


def _moved(place: Place | None, shift: int) -> Place | None:
    if place is None or place[1] is None:
        return place
    return (place[0], place[1] + shift, *place[2:])


@dataclass(frozen=True, slots=True)
class Depths:
    """Which shallow models tell a deep one: those of `blocks` and of `blocks + period` blocks.

    The first `edge` periods stay the first, the next one is what is repeated, and what follows (as many periods, and
    what divides into none) stays the last. The target's blocks differ from `blocks` by a multiple of the period.
    """

    blocks: int
    period: int
    edge: int = 1


def deepen(shallow: Program, deeper: Program, depths: Depths, target: int) -> Program:
    """The program at `target` blocks, from the ones recorded at `depths.blocks` and one period deeper.

    Raises NotUniform unless the shallow program, deepened by one period, is the deeper one.
    """
    predicted = _stretch(shallow, depths, depths.blocks + depths.period)
    if predicted.base != deeper.base or not _same(predicted.trace(), deeper.trace()):
        raise NotUniform("a deeper model does not repeat its blocks")
    for recomputed in (False, True):
        if predicted.flops(recomputed=recomputed) != deeper.flops(recomputed=recomputed):
            raise NotUniform("FLOPs do not grow linearly")
    return _stretch(shallow, depths, target)


def _same(first: Trace, second: Trace) -> bool:
    return first.storages == second.storages and first.phases == second.phases and first.blocks == second.blocks


def program(step: Step) -> Program:
    """A recorded step as a program."""
    return Program(_placed(_split(_cut(step), step)), step.base)


# --- from a recorded step to windows -------------------------------------------------------------------------------


@dataclass(slots=True)
class _Raw:
    """An event before storages have places: `storage` is an index into the trace's."""

    kind: str
    storage: int = -1
    count: int = 0
    text: str = ""
    block: int | None = None


def _cut(step: Step) -> list[tuple[str, list[tuple[int | None, list[_Raw]]]]]:
    """Sections of (block, raw events)."""
    sections: list[tuple[str, list[tuple[int | None, list[_Raw]]]]] = [("", [(None, [])])]
    leaving = False  # forward has left the last block; what dies right then is still the block's doing
    for _, action, raw in _items(step):
        windows = sections[-1][1]
        if action == "phase":
            sections.append((raw.text, [(None, [])]))
            leaving = False
            continue
        if action == "window":
            windows.append((raw.block, []))
            continue
        if raw.kind == "open" and raw.text == "forward":
            windows.append((raw.block, []))
        elif leaving and raw.kind != "-":
            windows.append((None, []))
            leaving = False
        windows[-1][1].append(raw)
        if raw.kind == "close" and raw.text == "forward" and raw.block == step.blocks - 1:
            leaving = True
    return sections


def _items(step: Step) -> list[tuple[float, str, _Raw]]:
    """Everything that happened, in order."""
    items: list[tuple[float, str, _Raw]] = []
    for index, storage in enumerate(step.trace.storages):
        block = _block_of(storage.where) if storage.where else None
        items.append((storage.born, "event", _Raw("+", index, storage.bytes, storage.category, block)))
        if storage.died != FOREVER:
            items.append((storage.died, "event", _Raw("-", index)))
    for span in step.trace.blocks:
        block = _block_of(span.name)
        items.append((span.start, "event", _Raw("open", text=span.phase, block=block)))
        items.append((span.end, "event", _Raw("close", text=span.phase, block=block)))
    for phase in step.trace.phases:
        items += [(phase.start, "phase", _Raw("", text=phase.name)), (phase.end, "phase", _Raw(""))]
    items += [(time, "window", _Raw("", block=block)) for time, block in step.cuts]
    items += [
        (time, "event", _Raw("flops", count=count, text="recomputed" if recomputed else ""))
        for time, count, recomputed in step.flops
    ]
    return sorted(items, key=lambda item: item[0])


def _block_of(name: str) -> int:
    return int(name.rpartition(" ")[2])


def _split(
    sections: list[tuple[str, list[tuple[int | None, list[_Raw]]]]], step: Step
) -> list[tuple[str, list[tuple[int | None, list[_Raw]]]]]:
    """Windows outside the blocks that free something of every block, cut at each: the optimizer drops one block's
    gradients after the other's, and autocast its cached weights in any order (deaths in a row are put in order)."""
    born_in: dict[int, int | None] = {}
    result = []
    for name, windows in sections:
        split: list[tuple[int | None, list[_Raw]]] = []
        for block, events in windows:
            for raw in events:
                if raw.kind == "+":
                    born_in[raw.storage] = block
            ordered = _ordered(events)
            freed = {born_in[raw.storage] for raw in ordered if raw.kind == "-"}
            visits_all = block is None and freed >= set(range(step.blocks))
            split += _by_block(ordered, born_in) if visits_all else [(block, ordered)]
        result.append((name, split))
    return result


def _ordered(events: list[_Raw]) -> list[_Raw]:
    """Runs of deaths in the order of birth."""
    result: list[_Raw] = []
    deaths: list[_Raw] = []
    for raw in [*events, None]:
        if raw is not None and raw.kind == "-":
            deaths.append(raw)
            continue
        result += sorted(deaths, key=attrgetter("storage"))
        deaths = []
        if raw is not None:
            result.append(raw)
    return result


def _by_block(events: list[_Raw], born_in: dict[int, int | None]) -> list[tuple[int | None, list[_Raw]]]:
    runs = itertools.groupby(events, key=lambda raw: born_in[raw.storage] if raw.kind == "-" else None)
    return [(block, list(members)) for block, members in runs]


def _placed(sections: list[tuple[str, list[tuple[int | None, list[_Raw]]]]]) -> list[Section]:
    places: dict[int, Place] = {}
    result = []
    for number, (name, windows) in enumerate(sections):
        section = Section(name)
        seen: Counter[int | None] = Counter()
        for block, events in windows:
            window = Window(block)
            births = 0
            for raw in events:
                if raw.kind == "+":
                    places[raw.storage] = (number, block, seen[block], births)
                    births += 1
                place = places[raw.storage] if raw.kind == "-" else None
                window.events.append(Event(raw.kind, raw.count, raw.text, raw.block, place))
            seen[block] += 1
            section.windows.append(window)
        result.append(section)
    return result


# --- from a shallow program to a deep one --------------------------------------------------------------------------


def _stretch(shallow: Program, depths: Depths, target: int) -> Program:
    depth = _Depth(depths.blocks, depths.period, depths.edge * depths.period, target)
    sections = [Section(section.name, list(depth.windows(section.windows))) for section in shallow.sections]
    return Program(sections, list(depth.base(shallow.base)))


@dataclass(frozen=True, slots=True)
class _Depth:
    blocks: int
    period: int
    head: int
    """Blocks, not periods."""
    target: int

    def template(self, block: int) -> int:
        """The recorded block that a block of the deep model repeats."""
        tail = self.blocks - self.head - self.period
        if block < self.head:
            return block
        if block >= self.target - tail:
            return block - (self.target - self.blocks)
        return self.head + (block - self.head) % self.period

    def place(self, block: int) -> int:
        """Where a recorded block of the head or of the tail stands in the deep model."""
        if block < self.head:
            return block
        if block >= self.head + self.period:
            return block + self.target - self.blocks
        raise NotUniform(f"something outside the blocks refers to block {block}")

    def windows(self, windows: Sequence[Window]) -> Iterator[Window]:
        index = 0
        while index < len(windows):
            ladder = self._ladder(windows, index)
            if ladder:
                deep = range(self.target) if ladder[0].block == 0 else reversed(range(self.target))
                by_block = {window.block: window for window in ladder}
                for block in deep:
                    yield _shift(by_block[self.template(block)], block - self.template(block))
                index += len(ladder)
                continue
            window = windows[index]
            if window.block is None:
                yield Window(None, [self._outside(event) for event in window.events])
            else:
                yield _shift(window, self.place(window.block) - window.block)
            index += 1

    def _ladder(self, windows: Sequence[Window], start: int) -> Sequence[Window]:
        """The windows from `start` on, if they visit every block once, up or down."""
        run = windows[start : start + self.blocks]
        visited = [window.block for window in run]
        whole = list(range(self.blocks))
        return run if visited in (whole, whole[::-1]) else ()

    def _outside(self, event: Event) -> Event:
        if event.place is None or event.place[1] is None:
            return event
        return replace(event, place=_moved(event.place, self.place(event.place[1]) - event.place[1]))

    def base(self, storages: Sequence[BaseStorage]) -> Iterator[BaseStorage]:
        windows: list[tuple[int | None, list[BaseStorage]]] = []
        for storage in storages:
            if not windows or windows[-1][0] != storage.block or windows[-1][1][-1].category != storage.category:
                windows.append((storage.block, []))
            windows[-1][1].append(storage)
        index = 0
        while index < len(windows):
            block, members = windows[index]
            run = windows[index : index + self.blocks]
            if [key for key, _ in run] == list(range(self.blocks)):
                for deep in range(self.target):
                    yield from (replace(member, block=deep) for member in run[self.template(deep)][1])
                index += self.blocks
                continue
            place = None if block is None else self.place(block)
            yield from (replace(member, block=place) for member in members)
            index += 1


def _shift(window: Window, shift: int) -> Window:
    assert window.block is not None
    return Window(window.block + shift, [event.shifted(shift) for event in window.events])


# --- from a program back to a trace --------------------------------------------------------------------------------


class _Run:
    def __init__(self, source: Program) -> None:
        self.clock = 0
        self.births: dict[tuple[int, int | None, int], list[Storage]] = {}
        self.open: list[Span] = []
        base: defaultdict[str, int] = defaultdict(int)
        for storage in source.base:
            base[storage.category] += storage.bytes
        self.trace = Trace([], [], [], dict(base), "events")
        for number, section in enumerate(source.sections):
            if section.name:
                self.trace.phases.append(Span(section.name, self._tick()))
            seen: Counter[int | None] = Counter()
            for window in section.windows:
                born: list[Storage] = []
                self.births[number, window.block, seen[window.block]] = born
                seen[window.block] += 1
                for event in window.events:
                    self._do(event, born)
            if section.name:
                self.trace.phases[-1].end = self._tick()

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def _do(self, event: Event, born: list[Storage]) -> None:
        name = "" if event.block is None else f"block {event.block}"
        if event.kind == "+":
            storage = Storage(event.count, self._tick(), category=event.text, where=name)
            born.append(storage)
            self.trace.storages.append(storage)
        elif event.kind == "-":
            if event.place is None or event.place[:3] not in self.births:
                raise NotUniform("a storage dies that was never born")
            siblings = self.births[event.place[:3]]
            if event.place[3] >= len(siblings):
                raise NotUniform("a storage dies that was never born")
            siblings[event.place[3]].died = self._tick()
        elif event.kind == "open":
            span = Span(name, self._tick(), phase=event.text)
            self.open.append(span)
            self.trace.blocks.append(span)
        elif event.kind == "close":
            self.open.pop().end = self._tick()
