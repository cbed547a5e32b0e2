"""The machine form of a page: its address with `.json` or `.csv` leads to the REST answer with the same query."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from app.pages.access import prefix

router = APIRouter(include_in_schema=False)

LISTS = {
    "/jobs.json": ("/api/v1/jobs", ""),
    "/runs.json": ("/api/v1/runs", ""),
    "/runs.csv": ("/api/v1/runs", "format=csv"),
    "/explore.json": ("/api/v1/tradeoff", ""),
    "/explore.csv": ("/api/v1/runs", "format=csv"),
}
DRAWING_ONLY = ("colour", "log_x", "log_y", "predictions")
"""Query keys of /explore that change the drawing and not the data."""


def _redirect(request: Request, path: str, more: str = "") -> Response:
    axes = ("x", "y") if path.endswith("/runs") else ()
    kept = [pair for pair in request.url.query.split("&") if pair and pair.split("=")[0] not in (*DRAWING_ONLY, *axes)]
    query = "&".join([*kept, *([more] if more else [])])
    return RedirectResponse(prefix(request) + path + (f"?{query}" if query else ""), status_code=307)


for page_path in LISTS:

    @router.get(page_path)
    def list_form(request: Request) -> Response:
        path = request.url.path.removeprefix(prefix(request))
        return _redirect(request, *LISTS[path])


@router.get("/jobs/{job_id}.json")
def job_form(request: Request, job_id: str) -> Response:
    return _redirect(request, f"/api/v1/jobs/{job_id}")


@router.get("/runs/{run_id}.json")
def run_form(request: Request, run_id: str) -> Response:
    return _redirect(request, f"/api/v1/runs/{run_id}")
