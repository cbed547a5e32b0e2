from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

from starlette.testclient import TestClient

from app.api.events import Place, follow
from app.jobs import log, queue
from app.services import Services

BODY = {"spec": {"model": "gpt-tiny", "device": "cpu"}, "vary": {"seq": [8, 16]}}


def events_of(text: str) -> list[dict[str, Any]]:
    """Server-sent events as dictionaries."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    parsed = [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks]
    return [{**event, "data": json.loads(event["data"])} for event in parsed]


def test_a_job_is_told_from_its_log_to_its_end(
    client: TestClient, board: Any, start_worker: Callable[..., Any]
) -> None:
    job_id = client.post("/api/v1/jobs", json=BODY).json()["id"]
    start_worker("noisy")
    board.ended(job_id)
    response = client.get(f"/api/v1/jobs/{job_id}/events")
    assert response.headers["content-type"].startswith("text/event-stream")
    told = events_of(response.text)
    kinds = [event["event"] for event in told]
    assert kinds.count("run") == 2
    assert kinds[-1] == "end"
    assert told[-1]["data"]["status"] == "succeeded"
    assert kinds.count("log") > 1000


def test_a_stream_resumes_after_the_last_event(
    client: TestClient, board: Any, start_worker: Callable[..., Any]
) -> None:
    job_id = client.post("/api/v1/jobs", json=BODY).json()["id"]
    start_worker()
    board.ended(job_id)
    told = events_of(client.get(f"/api/v1/jobs/{job_id}/events").text)
    first_run = next(event for event in told if event["event"] == "run")
    resumed = events_of(client.get(f"/api/v1/jobs/{job_id}/events", headers={"Last-Event-ID": first_run["id"]}).text)
    assert [event["data"]["id"] for event in resumed if event["event"] == "run"] == [board.results(job_id)[1]["id"]]


def test_an_unknown_job_has_no_stream(client: TestClient) -> None:
    assert client.get(f"/api/v1/jobs/{'0' * 32}/events").status_code == 404


def test_a_place_that_is_none_is_refused(client: TestClient) -> None:
    job_id = client.post("/api/v1/jobs", json=BODY).json()["id"]
    response = client.get(f"/api/v1/jobs/{job_id}/events", headers={"Last-Event-ID": "nonsense"})
    assert response.status_code == 422


def test_a_stream_ends_when_the_server_stops(board: Any, settings: Any) -> None:
    """An open stream would keep the server from ever shutting down."""
    job_id = board.submit()
    stopping = threading.Event()
    needs = Services(settings, board.database, None, stopping)  # type: ignore[arg-type]  # not asked to predict

    async def read() -> list[str]:
        kinds = []
        async for happening in follow(needs, job_id, Place()):
            kinds.append(happening.kind)
            stopping.set()
        return kinds

    assert asyncio.run(asyncio.wait_for(read(), 5)) == ["job"]


def test_what_happens_during_the_stream_is_told(board: Any, settings: Any) -> None:
    job_id = board.submit()
    needs = Services(settings, board.database, None)  # type: ignore[arg-type]  # not asked to predict

    async def read() -> list[str]:
        kinds = []
        async for happening in follow(needs, job_id, Place()):
            kinds.append(happening.kind)
            with board.database.write() as session:
                log.append(session, job_id, ["a line"], 1000)
                queue.cancel(session, job_id)
        return kinds

    kinds = asyncio.run(asyncio.wait_for(read(), 10))
    assert kinds[:2] == ["job", "log"]
    assert kinds[-1] == "end"
