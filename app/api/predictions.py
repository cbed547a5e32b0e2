"""POST /predictions: a spec's cost without running it."""

from __future__ import annotations

from fastapi import APIRouter

from app.api.schemas import PredictionRequest
from app.api.strict_json import StrictRoute
from app.db import predictions
from app.db.session import Database
from app.jobs.simulator import Simulator
from app.services import Needs
from engine.methods import check_method
from engine.result import RunResult
from engine.spec import RunSpec

router = APIRouter(tags=["predictions"], route_class=StrictRoute)


@router.post("/predictions")
def predict(request: PredictionRequest, needs: Needs) -> RunResult:
    """The closed form answers at once; a simulation takes seconds, and is kept for the next who asks."""
    if request.method == "closed-form":
        return closed_form(request.spec)
    return simulated(needs.database, needs.simulator, request.spec)


def closed_form(spec: RunSpec) -> RunResult:
    """Raises SpecError, naming the field, for what has no closed form."""
    from engine.closed_form import predict as by_formula  # not needed to start serving

    return by_formula(spec)


def simulated(database: Database, simulator: Simulator, spec: RunSpec) -> RunResult:
    """From the cache, or from the simulator's runner. Raises UnsupportedError, RunnerBusy or RunnerDied."""
    check_method(spec, "simulated")
    with database.read() as session:
        kept = predictions.find(session, spec.spec_hash, "simulated")
    if kept is not None:
        return RunResult.model_validate(kept[0])
    result, timeline = simulator.answer(spec, "simulated")
    if result.outcome != "failed":
        with database.write() as session:
            shown = timeline.model_dump(mode="json") if timeline else None
            predictions.keep(session, result.model_dump(mode="json"), shown)
    return result
