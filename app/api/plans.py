"""POST /plans: which configuration fits a GPU, and which of those is the fastest."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field, field_validator

from app.api.schemas import Body
from app.api.strict_json import StrictRoute
from engine.catalog import gpu as find_gpu
from engine.planning import Objective, Plan, plan
from engine.spec import RunSpec

router = APIRouter(tags=["plans"], route_class=StrictRoute)


class PlanRequest(Body):
    spec: RunSpec
    gpu: Annotated[str, Field(max_length=100, description="A catalog GPU.")]
    gpus: Annotated[int, Field(strict=True, ge=1, le=2**16)] = 1
    host_memory_gib: Annotated[float, Field(strict=True, ge=0, le=2**20)] = 512
    nvme_gib: Annotated[float, Field(strict=True, ge=0, le=2**30)] = 0
    objective: Objective = "throughput"

    @field_validator("gpu")
    @classmethod
    def _known_gpu(cls, value: str) -> str:
        return find_gpu(value).slug


@router.post("/plans")
def make_plan(body: PlanRequest) -> Plan:
    """The recommended configuration, the ladder from plain to frugal, and the frontier of memory against speed."""
    return plan(body.spec, body.gpu, body.gpus, body.host_memory_gib, body.nvme_gib, body.objective)
