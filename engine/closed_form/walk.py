"""Live bytes while a tape runs forward, is recomputed and runs backward: what autograd allocates and frees, in order.

The rules are torch's: an op's saved tensors die when its backward has run; the gradient of a tensor that several ops
read is added in place unless its storage is shared; a residual addition hands the same storage to both branches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from engine.closed_form.tape import Op, Tape
from engine.result import CATEGORIES, Phase


@dataclass
class Meter:
    """Live bytes by category, and the most that were ever alive at once."""

    live: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    total: int = 0
    phase: Phase = "forward"
    peak: int = 0
    peak_phase: Phase = "forward"
    at_peak: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    aside: int = 0
    """Live bytes in the memory pools of side streams (`engine.closed_form.gathering`)."""
    main_peak: int = 0
    """The most that was ever alive outside those."""

    def add(self, category: str, count: int) -> None:
        """`count` bytes more (or, negative, fewer) are alive."""
        self.live[category] += count
        self.total += count
        if self.total > self.peak:
            self.peak, self.peak_phase, self.at_peak = self.total, self.phase, dict(self.live)
        self.main_peak = max(self.main_peak, self.total - self.aside)

    def move(self, count: int, source: str, target: str) -> None:
        """Bytes change their category."""
        self.live[source] -= count
        self.live[target] += count

    def blip(self, count: int) -> None:
        """Temporary bytes that live only for a moment."""
        if count and (self.total + count > self.peak or self.total + count - self.aside > self.main_peak):
            self.add("temporaries", count)
            self.add("temporaries", -count)


def run_forward(meter: Meter, tape: Tape, kept: Collection[str], *, stop: int | None = None) -> None:
    """Run ops (up to index `stop`, inclusive), keeping the tensors named in `kept` and, without `stop`, the output.

    The tape's inputs are alive already and stay so; what is not kept dies after its last reader.
    """
    last_index = len(tape.ops) - 1 if stop is None else stop
    output = tape.ops[-1].makes[0].name if stop is None else None
    dying: dict[int, list[str]] = {}
    for name, index in tape.last_read.items():
        dying.setdefault(min(index, last_index), []).append(name)
    alive: set[str] = set()
    for index, op in enumerate(tape.ops[: last_index + 1]):
        for tensor in op.makes:
            meter.add(_category(tensor.name, kept, output), tensor.bytes)
            alive.add(tensor.name)
        meter.blip(op.scratch)
        for name in dying.get(index, ()):
            if name in alive and name not in kept and name != output:
                meter.add("temporaries", -tape.tensors[name].bytes)


def _category(name: str, kept: Collection[str], output: str | None) -> str:
    return "activations" if name in kept or name == output else "temporaries"


class _Again:
    """Tensors of a tape that are alive in its backward, and the making again of those that are not."""

    def __init__(self, meter: Meter, tape: Tape, alive: set[str]) -> None:
        self.meter, self.tape, self.alive = meter, tape, alive
        self.waiting = Counter(name for op in tape.ops for name in op.saves if name in tape.saved)
        self.sources: Counter[str] = Counter()
        """How many tensors still to be made again read each tensor."""
        if not self.alive.issuperset(self.waiting):
            pending = [name for name in self.waiting if name not in alive]
            while pending:
                for read in self._reads(pending.pop()):
                    if not self.sources[read] and read not in alive and read not in self.waiting:
                        pending.append(read)
                    self.sources[read] += 1

    def _reads(self, name: str) -> tuple[str, ...]:
        """A dropout mask depends on the generator alone."""
        return () if self.tape.tensors[name].dtype == "bool" else self.tape.makers[name].reads

    def need(self, name: str) -> None:
        if name in self.alive or self.tape.tensors[name].parameter:
            return
        reads = self._reads(name)
        for read in reads:
            self.need(read)
        self.alive.add(name)
        self.meter.add("activations", self.tape.tensors[name].bytes)
        self.meter.blip(self.tape.makers[name].scratch)
        for read in reads:
            self.sources[read] -= 1
            self._drop_if_done(read)

    def done(self, name: str) -> None:
        """One op that saved `name` has run backward."""
        if name in self.waiting:
            self.waiting[name] -= 1
            self._drop_if_done(name)

    def _drop_if_done(self, name: str) -> None:
        if name in self.alive and not self.waiting[name] and not self.sources[name]:
            self.alive.remove(name)
            self.meter.add("activations", -self.tape.tensors[name].bytes)

    def close(self) -> None:
        """The block's graph is gone, and with it what was kept only to make other tensors again."""
        for name in tuple(self.alive):
            self.alive.remove(name)
            self.meter.add("activations", -self.tape.tensors[name].bytes)


@dataclass
class _Gradient:
    """A gradient storage that several consumers may share."""

    bytes: int
    owners: int


class Backward:
    """The gradients alive while tapes run backward. `accumulated`: parameter gradients exist from before and are
    added to, so that a new one lives only until it is added."""

    def __init__(self, meter: Meter, *, accumulated: bool = False) -> None:
        self.meter = meter
        self.accumulated = accumulated
        self.flowing: dict[str, _Gradient] = {}
        self.waits = False
        self.drops = False
        """A weight leaves the device once its gradient is complete."""

    def seed(self, name: str, count: int) -> None:
        """The gradient of `name`, `count` bytes, is alive already (the meter counts it)."""
        self.flowing[name] = _Gradient(count, 1)

    def rename(self, old: str, new: str) -> None:
        """The gradient of one tape's input is the gradient of the tape before's output."""
        self.flowing[new] = self.flowing.pop(old)

    def run(self, tape: Tape, kept: Collection[str] | None = None, *, tied_head: bool = False) -> None:
        """Backward of a tape of which `kept` (by default, all that it saves) is alive; the rest is made again when
        an op asks for it. A `tied_head`'s gradient waits for the embedding's, whatever has accumulated."""
        self.waits = tied_head
        again = _Again(self.meter, tape, set(tape.saved if kept is None else kept))
        for op in reversed(tape.ops):
            for name in op.saves:
                again.need(name)
            self._run_op(tape, op)
            for name in op.saves:
                again.done(name)
        again.close()

    def _run_op(self, tape: Tape, op: Op) -> None:
        incoming = [self.flowing.pop(tensor.name) for tensor in op.makes if tensor.name in self.flowing]
        readers = [tape.tensors[name] for name in op.reads if tape.tensors[name].differentiable]
        if op.passes and incoming:
            shared = incoming[0]
            for tensor in readers:
                shared.owners += 1
                if tensor.bytes == shared.bytes:
                    self._arrive(tensor.name, shared)
                else:
                    self._arrive(tensor.name, self._make(tensor.bytes))
                    shared.owners -= 1
            self._weights(op)
        else:
            made = [(tensor.name, self._make(tensor.bytes)) for tensor in readers]
            self._weights(op)
            for name, gradient in made:
                self._arrive(name, gradient)
        for gradient in incoming:
            self._release(gradient)

    def _weights(self, op: Op) -> None:
        """Parameter gradients: new ones stay; ones that are added to older ones do not."""
        count = sum(size for _, size in op.weights)
        self.meter.add("temporaries" if self.accumulated else "gradients", count)
        self.meter.blip(op.backward_scratch)
        if self.accumulated and not self.waits:
            self.meter.add("temporaries", -count)
        if self.drops:
            self.meter.add("parameters", -count)

    def _make(self, count: int) -> _Gradient:
        self.meter.add("temporaries", count)
        return _Gradient(count, 1)

    def _arrive(self, name: str, gradient: _Gradient) -> None:
        """A gradient reaches a tensor's node; a second one is added to the first."""
        first = self.flowing.get(name)
        if first is None:
            self.flowing[name] = gradient
        elif first.owners == 1:
            self._release(gradient)
        else:
            self.flowing[name] = self._make(first.bytes)
            self._release(first)
            self._release(gradient)

    def _release(self, gradient: _Gradient) -> None:
        gradient.owners -= 1
        if gradient.owners == 0:
            self.meter.add("temporaries", -gradient.bytes)
