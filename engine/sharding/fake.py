"""Rank 0 of a process group of any size in which no other process is: what a simulation runs sharding in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Collectives inside return at once and change nothing; without other ranks there is no group at all."""
    if world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
