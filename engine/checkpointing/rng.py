"""Random ops run again with the generator state they first ran with, so that dropout masks come back bit-equal.

The state is kept as bytes of the interpreter (5056 on a CPU, 16 on CUDA): it is host memory, no saved activation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from engine.errors import UnsupportedError

REPLAYABLE = ("cpu", "cuda")


def check_replayable(device: torch.device) -> None:
    """Raises UnsupportedError where dropout masks could not be made again."""
    if device.type not in REPLAYABLE:
        raise UnsupportedError(
            "checkpointing, dropout",
            f"the generator of a {device.type} device cannot be replayed here, so recomputed dropout masks would "
            f"differ; use dropout=0 or checkpointing=none (devices that can: {', '.join(REPLAYABLE)})",
        )


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        generators: tuple[torch.Generator, ...] = torch.cuda.default_generators
        return generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def capture(device: torch.device) -> bytearray:
    """The device's generator state, now."""
    with unset_fake_temporarily():
        return bytearray(_generator(device).get_state().numpy().tobytes())


@contextmanager
def replay(device: torch.device, state: bytearray) -> Iterator[None]:
    """Random ops inside start from `state`; the generator goes on afterwards as if they had not run."""
    generator = _generator(device)
    with unset_fake_temporarily():
        before = generator.get_state()
        generator.set_state(torch.frombuffer(state, dtype=torch.uint8))
    try:
        yield
    finally:
        generator.set_state(before)


class Replayed:
    """The two contexts of one checkpointed region: `first` notes the state, `again` replays it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.state = bytearray()

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Both, as `torch.utils.checkpoint` asks for them."""
        return self.first(), self.again()

    @contextmanager
    def first(self) -> Iterator[None]:
        self.state = capture(self.device)
        yield

    @contextmanager
    def again(self) -> Iterator[None]:
        with replay(self.device, self.state):
            yield
