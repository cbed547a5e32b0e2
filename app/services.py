"""What a request needs: made once by the lifespan, reached through `Needs`."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Annotated, TypedDict

from fastapi import Depends, Request

from app.db.session import Database
from app.jobs.simulator import Simulator
from app.settings import Settings


@dataclass(frozen=True, slots=True)
class Services:
    settings: Settings
    database: Database
    simulator: Simulator
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when the server is asked to stop: open event streams end, or the server would wait for them for ever."""


class State(TypedDict):
    """The lifespan's state."""

    services: Services


def services(request: Request) -> Services:
    found: Services = request.state.services
    return found


Needs = Annotated[Services, Depends(services)]
