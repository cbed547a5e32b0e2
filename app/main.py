"""The web application: `create_app(settings)` makes one; nothing is global."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.staticfiles import StaticFiles

from app import login, pages, security
from app.api import catalog, exercises, health, jobs, plans, predictions, problems, queries, reference, runs
from app.db.migrate import open_database
from app.jobs.simulator import Simulator
from app.jobs.supervisor import Supervisor
from app.pages.errors import ErrorPages
from app.services import Services, State
from app.settings import Settings, static_directory

ERRORS: dict[int | str, dict[str, Any]] = dict.fromkeys(
    (400, 403, 404, 413, 422, 500, 502, 503), problems.PROBLEM_SCHEMA
)


def create_app(
    settings: Settings, *, supervise_worker: bool = False, stopping: threading.Event | None = None
) -> FastAPI:
    """The application. With `supervise_worker` its lifespan keeps a worker process running beside it.

    Setting `stopping` ends open event streams. Starting raises DatabaseRefused if the database cannot be used.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[State]:
        database = open_database(settings.data_dir, settings.busy_seconds)
        simulator = Simulator(settings.runner_command, settings.prediction_seconds)
        supervisor = Supervisor(settings)
        if supervise_worker:
            supervisor.start()
        yield {"services": Services(settings, database, simulator, stopping or threading.Event())}
        supervisor.stop()
        simulator.close()
        database.close()

    app = FastAPI(
        title="Remat",
        version=version("remat"),
        description="Which mix of checkpointing, recomputation, flash attention, offloading and sharding makes a "
        "training run fit, and what it costs in speed.",
        lifespan=lifespan,
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
        redirect_slashes=False,
    )
    api = APIRouter(prefix="/api/v1", responses=ERRORS, dependencies=[queries.KNOWN_QUERY])
    for module in (catalog, predictions, plans, jobs, runs, exercises):
        api.include_router(module.router)
    app.include_router(api)
    app.include_router(health.router)
    app.include_router(reference.router)
    app.include_router(login.router)
    app.include_router(pages.router)
    app.mount("/static", StaticFiles(directory=static_directory()), name="static")
    problems.install(app)
    security.install(app, settings)
    app.add_middleware(ErrorPages)
    return app
