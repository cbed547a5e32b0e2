"""The HTML pages. `router` is all of them; each module owns its paths."""

from fastapi import APIRouter

from app.pages import about, accuracy, exercises, explore, home, jobs, learn, machine, plan, runs

router = APIRouter(include_in_schema=False)
for module in (machine, home, plan, jobs, runs, explore, exercises, learn, accuracy, about):
    router.include_router(module.router)
