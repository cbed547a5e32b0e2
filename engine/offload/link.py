"""Copies between device and host, and the threads that work beside the training thread.

On CUDA each direction has a stream of its own; events order them against compute. A copy's source is kept alive until
its event has passed, rather than marked with `record_stream`, which delays reuse by an unknown time (pytorch#147168).

On a CPU there is no copy engine. Copies down run on the training thread, so that what they free is freed at a known
instant; copies up run on a thread of their own. All memory of the device is allocated and freed by the training
thread, the only one whose allocator events the profiler sees.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec

import torch
from torch import Tensor

from engine.offload.tiers import HostBlock, Ledger

P = ParamSpec("P")

STACK_BYTES = 2**20  # of a lane's thread; the default of 8 MiB would count against a cap on the device
MAX_STASHED = 4  # sources waiting for their copy down; more would let the copies fall behind at the device's expense


class Lane:
    """A thread that runs calls in order. Serial: the caller waits for each. Simulated: nothing runs."""

    def __init__(self, name: str, *, threads: int = 1, serial: bool = False, simulated: bool = False) -> None:
        """`threads` is how many of torch's threads an operator on this lane may use: a copy beside compute needs one,
        and more would spin for the cores that compute is using."""
        self.serial, self.simulated = serial, simulated
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        everywhere, stack_bytes = torch.get_num_threads(), threading.stack_size(STACK_BYTES)
        self._pool.submit(torch.get_num_threads).result()  # a thread's first question resets it to the default
        self._pool.submit(torch.set_num_threads, threads).result()
        threading.stack_size(stack_bytes)
        torch.set_num_threads(everywhere)  # the line above set the default as well

    def submit(self, call: Callable[P, object], *arguments: P.args, **options: P.kwargs) -> Future[Any]:
        """Run `call` after everything submitted before it. A serial lane raises what it raises here."""
        if self.simulated:
            done: Future[Any] = Future()
            done.set_result(None)
            return done
        future = self._pool.submit(call, *arguments, **options)
        if self.serial:
            future.result()
        return future

    def close(self) -> None:
        """Drop what has not started and wait for what has."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class Copy:
    """A copy under way: `wait` blocks the calling thread until it landed, `join` only the compute stream."""

    def __init__(
        self,
        future: Future[Any] | None = None,
        event: torch.cuda.Event | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.future, self.event, self.ledger = future, event, ledger

    def wait(self) -> None:
        if self.future is not None:
            self.future.result()
        if self.event is not None:
            self.event.synchronize()

    def join(self) -> None:
        if self.future is not None:
            self.future.result()
        if self.event is not None and self.ledger is not None:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            torch.cuda.current_stream().wait_event(self.event)
            after.record()
            self.ledger.stalls.append((before, after))


class Link:
    """The path between one device and host memory."""

    def __init__(self, device: torch.device, ledger: Ledger, *, overlap: bool, simulated: bool = False) -> None:
        self.ledger, self.overlap, self.simulated = ledger, overlap, simulated
        self.cuda = device.type == "cuda" and not simulated
        self._stash: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        self._lane = Lane("remat-up", serial=not overlap, simulated=simulated)
        if self.cuda:
            self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def down(self, source: Tensor, block: HostBlock, offset: int = 0) -> Copy:
        """Copy a device tensor to `offset` of a host block, after what compute has been asked for so far."""
        self.ledger.move("down", source.nbytes)
        if self.simulated:
            return Copy()
        target = block.view(offset, tuple(source.shape), source.dtype)
        if not self.cuda:
            target.copy_(source)
            return Copy()
        self._down.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(self._down):
            target.copy_(source, non_blocking=True)
            event = self._down.record_event()
        self._stash.append((event, source))
        self._settle(MAX_STASHED if self.overlap else 0)
        return Copy(event=event, ledger=self.ledger)

    def up(self, block: HostBlock, target: Tensor, offset: int = 0) -> Copy:
        """Copy from `offset` of a host block to memory that compute may have used. Call from the training thread."""
        if self.simulated:
            self.ledger.move("up", target.nbytes)
            return Copy()
        source = block.view(offset, tuple(target.shape), target.dtype)
        if not self.cuda:
            return Copy(self._lane.submit(self.update, source, target))
        copy = self.update(source, target, after=torch.cuda.current_stream().record_event())
        if not self.overlap:
            copy.wait()
        return copy

    def update(self, source: Tensor, target: Tensor, *, after: torch.cuda.Event | None = None) -> Copy:
        """Copy a host tensor into a device tensor that compute has finished with, by `after` at the latest."""
        self.ledger.move("up", target.nbytes)
        if not self.cuda:
            target.copy_(source)
            return Copy()
        with torch.cuda.stream(self._up):
            if after is not None:
                self._up.wait_event(after)
            target.copy_(source, non_blocking=True)
            return Copy(event=self._up.record_event(), ledger=self.ledger)

    def _settle(self, keep: int) -> None:
        """Let go of the sources whose copy is done; wait until at most `keep` are held."""
        while self._stash and (len(self._stash) > keep or self._stash[0][0].query()):
            event, _ = self._stash[0]
            event.synchronize()
            self._stash.popleft()

    def close(self) -> None:
        self._lane.close()
        self._settle(0)
