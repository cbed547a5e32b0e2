from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Callable
from typing import Any

import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from app.db import runs
from app.db.migrate import open_database
from app.db.models import new_id
from app.exports import FORMULA_STARTS
from app.fields import COLUMNS, NUMBERS
from app.settings import Settings
from engine.result import AtPeak, Memory, RunResult, Timeline, Timing
from engine.spec import RunSpec

BODY = {"spec": {"model": "gpt-tiny", "device": "cpu"}, "vary": {"seq": [8, 16]}}


def result_of(peak: int, speed: float, **spec: Any) -> RunResult:
    made = RunSpec.model_validate({"model": "gpt-tiny", "device": "cpu", **spec})
    memory = Memory(device_peak_bytes=peak, at_peak=AtPeak(activations=peak))
    timing = Timing(step_seconds=1 / speed, tokens_per_second=speed)
    return RunResult(
        id=new_id(), spec=made, spec_hash=made.spec_hash, method="measured", outcome="ok", memory=memory, timing=timing
    )


@pytest.fixture
def stored(client: TestClient, settings: Settings) -> list[RunResult]:
    """Five results: four on a curve, one out of memory."""
    made = [
        result_of(100, 10.0, seq=8),
        result_of(200, 30.0, seq=16, attention="standard"),
        result_of(300, 20.0, seq=16),
        result_of(400, 31.0, seq=32, checkpointing="per-layer"),
    ]
    out = result_of(1, 1.0, seq=64).model_copy(update={"outcome": "oom", "memory": Memory(), "timing": Timing()})
    timeline = Timeline(
        x_unit="events", x=[0], parameters=[1], gradients=[0], optimizer_states=[0], activations=[0], temporaries=[0],
        phases=[], blocks=[], peak_index=0, alive_at_peak=[],
    )  # fmt: skip
    database = open_database(settings.data_dir)
    with database.write() as session:
        for result in (*made, out):
            runs.add(session, result, timeline if result is made[0] else None)
    database.close()
    return [*made, out]


def test_the_vocabulary(client: TestClient) -> None:
    models = {model["name"]: model for model in client.get("/api/v1/models").json()}
    assert models["gpt-tiny"]["layers"] == 4
    assert models["llama-2-7b"]["parameters"] == 6_738_415_616
    assert any(gpu["slug"] == "h100-sxm" for gpu in client.get("/api/v1/gpus").json())
    assert [option["key"] for option in client.get("/api/v1/options").json()] == list(RunSpec.model_fields)
    assert all(option["description"] for option in client.get("/api/v1/options").json())


def test_a_submitted_job_can_be_read(client: TestClient) -> None:
    response = client.post("/api/v1/jobs", json=BODY)
    assert response.status_code == 202
    job = response.json()
    assert response.headers["location"] == f"/api/v1/jobs/{job['id']}"
    assert client.get(response.headers["location"]).json() == job
    assert (job["status"], job["runs_total"]) == ("queued", 2)
    assert client.get("/api/v1/jobs", params={"status": "queued"}).json()["items"] == [job]
    assert client.get("/api/v1/jobs", params={"status": "failed"}).json()["items"] == []
    assert client.get(f"/api/v1/jobs/{job['id']}/log").json() == {"lines": [], "next_after": 0}


def test_jobs_come_in_pages(client: TestClient) -> None:
    ids = [client.post("/api/v1/jobs", json=BODY).json()["id"] for _ in range(5)]
    found: list[str] = []
    cursor: str | None = None
    while True:
        page = client.get("/api/v1/jobs", params={"limit": 2} | ({"cursor": cursor} if cursor else {})).json()
        found += [job["id"] for job in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found == ids[::-1]


def test_the_same_key_is_the_same_job(client: TestClient) -> None:
    headers = {"Idempotency-Key": "once"}
    first, second = (client.post("/api/v1/jobs", json=BODY, headers=headers) for _ in range(2))
    assert first.json()["id"] == second.json()["id"]
    other = client.post("/api/v1/jobs", json={**BODY, "priority": 1}, headers=headers)
    assert other.status_code == 422
    assert other.json()["errors"][0]["field"] == "Idempotency-Key"
    assert len(client.get("/api/v1/jobs").json()["items"]) == 1


def test_cancel_and_retry_are_idempotent(client: TestClient) -> None:
    job = client.post("/api/v1/jobs", json=BODY).json()
    for action, status in (("cancel", "cancelled"), ("cancel", "cancelled"), ("retry", "queued"), ("retry", "queued")):
        response = client.post(f"/api/v1/jobs/{job['id']}/{action}")
        assert (response.status_code, response.json()["status"]) == (202, status)


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/nowhere", "/api/v1/jobs/" + "0" * 32, "/api/v1/jobs/..%2f..%2fetc", "/api/v1/jobs/%00",
        "/api/v1/runs/" + "0" * 32, "/api/v1/runs/x", "/api/v1/runs/" + "0" * 32 + "/timeline", "/api/v1/jobs/",
    ],
)  # fmt: skip
def test_what_is_not_there_is_a_problem(client: TestClient, method: str, path: str) -> None:
    response = client.request(method, path)
    assert response.status_code in (404, 405, 422)
    assert response.headers["content-type"] == "application/problem+json"


def test_other_methods_are_refused_with_those_allowed(client: TestClient) -> None:
    response = client.delete("/api/v1/jobs")
    assert response.status_code == 405
    assert response.json()["title"] == "Method Not Allowed"


ID = "0" * 32
NOW = "2026-11-29T16:58:19.123456Z"


def cursor_of(*parts: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode()


@pytest.mark.parametrize(
    ("sort", "cursor"),
    [
        ("-created_at", cursor_of("-created_at", True, 1e308, "x")),
        ("-created_at", cursor_of("-created_at", False, NOW, ID)),
        ("-created_at", cursor_of("-created_at", 0.0, NOW, ID)),
        ("-created_at", cursor_of("-created_at", 0, 2**70, ID)),
        ("-created_at", cursor_of("-created_at", 0, 5, ID)),
        ("-created_at", cursor_of("-created_at", 0, float("nan"), ID)),
        ("-created_at", cursor_of("-created_at", 0, "\x00", ID)),
        ("-created_at", cursor_of("-created_at", 0, "\ud800", ID)),
        ("-created_at", cursor_of("-created_at", 0, "9999", ID)),
        ("-created_at", cursor_of("-created_at", 0, "2026-13-29T16:58:19.123456Z", ID)),
        ("-created_at", cursor_of("-created_at", 0, NOW, "\ud800")),
        ("-created_at", cursor_of("-created_at", 0, NOW, ID + "\n")),
        ("-created_at", cursor_of("-created_at", 0, NOW, ID, ID)),
        ("-created_at", cursor_of("-created_at", 0, NOW, ID) + "A"),
        ("-created_at", cursor_of("created_at", 0, NOW, ID)),
        ("spec.seq", cursor_of("spec.seq", 0, 2**70, ID)),
        ("spec.seq", cursor_of("spec.seq", 0, float("inf"), ID)),
        ("spec.seq", cursor_of("spec.seq", 0, True, ID)),
        ("spec.seq", cursor_of("spec.seq", 0, "8", ID)),
        ("spec.seq", cursor_of("spec.seq", 2, 8, ID)),
    ],
)
def test_only_cursors_of_ours_are_read(client: TestClient, sort: str, cursor: str) -> None:
    response = client.get("/api/v1/runs", params={"sort": sort, "cursor": cursor})
    assert response.status_code == 422
    assert [error["field"] for error in response.json()["errors"]] == ["cursor"]


def test_a_cursor_may_lie_before_every_run(client: TestClient, stored: list[RunResult]) -> None:
    items = client.get("/api/v1/runs", params={"cursor": cursor_of("-created_at", 0, "2001" + NOW[4:], ID)}).json()
    assert items == {"items": [], "next_cursor": None}


def test_runs_are_found_by_id(client: TestClient, stored: list[RunResult]) -> None:
    wanted = [stored[0].id, stored[3].id]
    items = client.get("/runs.json", params={"ids": wanted, "sort": "created_at"}).json()["items"]
    assert [item["id"] for item in items] == wanted


def test_a_job_without_runs_has_none(client: TestClient, stored: list[RunResult]) -> None:
    assert client.get(f"/api/v1/runs?job_id={ID}").json()["items"] == []


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", [0, 1, 2, 3, 4]),
        ("seq=16", [1, 2]),
        ("seq=16&attention=standard", [1]),
        ("seq=8&seq=32", [0, 3]),
        ("outcome=oom", [4]),
        ("offload_overlap=true", [0, 1, 2, 3, 4]),
        ("offload_overlap=false", []),
        ("gpu=none", [0, 1, 2, 3, 4]),
        ("memory_limit_gib=none", [0, 1, 2, 3, 4]),
        ("model=' OR 1=1 --", []),
        ("method=simulated", []),
    ],
)
def test_filters(client: TestClient, stored: list[RunResult], query: str, expected: list[int]) -> None:
    items = client.get(f"/api/v1/runs?sort=created_at&{query}").json()["items"]
    assert [item["id"] for item in items] == [stored[index].id for index in expected]


@pytest.mark.parametrize("sort", ["memory.device_peak_bytes", "-timing.tokens_per_second", "spec.seq", "-created_at"])
def test_pages_of_any_sort_hold_every_run_once(client: TestClient, stored: list[RunResult], sort: str) -> None:
    whole = [item["id"] for item in client.get(f"/api/v1/runs?sort={sort}").json()["items"]]
    assert sorted(whole) == sorted(result.id for result in stored)
    found: list[str] = []
    cursor = ""
    while cursor is not None:
        page = client.get(f"/api/v1/runs?sort={sort}&limit=2" + (f"&cursor={cursor}" if cursor else "")).json()
        found += [item["id"] for item in page["items"]]
        cursor = page["next_cursor"]
    assert found == whole


def test_unknown_numbers_sort_last(client: TestClient, stored: list[RunResult]) -> None:
    for sort in ("memory.device_peak_bytes", "-memory.device_peak_bytes"):
        assert client.get(f"/api/v1/runs?sort={sort}").json()["items"][-1]["outcome"] == "oom"


def test_a_run_in_full(client: TestClient, stored: list[RunResult]) -> None:
    run = client.get(f"/api/v1/runs/{stored[0].id}").json()
    assert RunResult.model_validate({key: value for key, value in run.items() if key != "job_id"}) == stored[0]
    assert client.get(f"/api/v1/runs/{stored[0].id}/timeline").json()["x_unit"] == "events"
    assert client.get(f"/api/v1/runs/{stored[1].id}/timeline").status_code == 404


def test_csv_holds_what_the_list_holds(client: TestClient, stored: list[RunResult]) -> None:
    response = client.get("/api/v1/runs?format=csv&seq=16")
    assert response.headers["content-type"] == "text/csv; charset=utf-8"
    rows = list(csv.DictReader(io.StringIO(response.text)))
    assert list(rows[0]) == list(COLUMNS)
    assert [row["id"] for row in rows] == [stored[1].id, stored[2].id]
    assert rows[0]["memory.device_peak_bytes"] == "200"


@pytest.mark.parametrize("format", ["csv", "parquet"])
@pytest.mark.parametrize("query", ["sort=-spec.seq", "cursor=abc"])
def test_a_file_has_no_pages_and_one_order(client: TestClient, format: str, query: str) -> None:
    response = client.get(f"/api/v1/runs?format={format}&{query}")
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == query.partition("=")[0]


def test_csv_is_harmless_in_a_spreadsheet(client: TestClient, settings: Settings) -> None:
    database = open_database(settings.data_dir)
    with database.write() as session:
        for start in FORMULA_STARTS:
            bad = result_of(1, 1.0).model_copy(update={"id": new_id(), "error": f"{start}cmd|'/C calc'!A0"})
            runs.add(session, bad)
    database.close()
    rows = list(csv.DictReader(io.StringIO(client.get("/api/v1/runs?format=csv").text, newline="")))
    assert len(rows) == len(FORMULA_STARTS)
    assert all(row["error"].startswith("'") for row in rows)


def test_parquet_has_typed_columns(client: TestClient, stored: list[RunResult]) -> None:
    table = pq.read_table(io.BytesIO(client.get("/api/v1/runs?format=parquet").content))
    assert table.column_names == list(COLUMNS)
    assert table.column("memory.device_peak_bytes").to_pylist() == [100, 200, 300, 400, None]
    assert str(table.schema.field("timing.tokens_per_second").type) == "double"


def test_tradeoff(client: TestClient, stored: list[RunResult]) -> None:
    curve = client.get("/api/v1/tradeoff").json()
    assert [point["id"] for point in curve["points"]] == [result.id for result in stored]
    assert curve["frontier"] == [stored[0].id, stored[1].id, stored[3].id]
    assert curve["knee"] == stored[1].id
    assert (curve["points"][4]["x"], curve["points"][4]["y"]) == (None, None)


def test_tradeoff_on_other_axes(client: TestClient, stored: list[RunResult]) -> None:
    curve = client.get("/api/v1/tradeoff?x=spec.seq&y=timing.step_seconds&seq=8&seq=16").json()
    assert {(point["x"], point["y"]) for point in curve["points"]} == {(8, 0.1), (16, 1 / 30), (16, 0.05)}
    assert curve["frontier"] == [stored[0].id, stored[1].id]


@pytest.mark.parametrize("axis", ["x", "y"])
def test_an_axis_that_is_no_number_is_refused(client: TestClient, axis: str) -> None:
    response = client.get(f"/api/v1/tradeoff?{axis}=spec.model")
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == axis
    assert NUMBERS[0] in response.json()["errors"][0]["message"]


def test_no_runs_have_no_knee(client: TestClient) -> None:
    curve = client.get("/api/v1/tradeoff").json()
    assert (curve["points"], curve["frontier"], curve["knee"]) == ([], [], None)


def test_closed_form_prediction(client: TestClient) -> None:
    answer = client.post("/api/v1/predictions", json={"spec": {"model": "gpt-tiny"}})
    assert answer.status_code == 200
    assert answer.json()["method"] == "closed-form"
    assert answer.json()["memory"]["device_peak_bytes"] > 0


def test_a_plan(client: TestClient) -> None:
    body = {"spec": {"model": "llama-2-7b", "seq": 4096}, "gpu": "h100-sxm", "gpus": 8}
    plan = client.post("/api/v1/plans", json=body).json()
    assert plan["recommended"]["fits"]
    assert plan["ladder"]
    refused = client.post("/api/v1/plans", json={**body, "gpu": "abacus"})
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "gpu")


def test_simulated_predictions_are_kept(client: TestClient, settings: Settings) -> None:
    body = {"spec": {"model": "gpt-tiny", "seq": 8}, "method": "simulated"}
    first, second = (client.post("/api/v1/predictions", json=body).json() for _ in range(2))
    assert first["method"] == "simulated"
    assert first["memory"]["device_peak_bytes"] == 8000
    assert second == first


def test_a_dead_runner_is_said_and_replaced(make_settings: Callable[..., Settings], new_client: Any) -> None:
    body = {"spec": {"model": "gpt-tiny"}, "method": "simulated"}
    with new_client(make_settings("die")) as client:
        for _ in range(2):
            response = client.post("/api/v1/predictions", json=body)
            assert response.status_code == 502
            assert "SIGKILL" in response.json()["detail"]


def test_a_slow_prediction_is_given_up(make_settings: Callable[..., Settings], new_client: Any) -> None:
    with new_client(make_settings("slow", prediction_seconds=0.5)) as client:
        response = client.post("/api/v1/predictions", json={"spec": {"model": "gpt-tiny"}, "method": "simulated"})
    assert response.status_code == 502
    assert "job" in response.json()["detail"]


def test_a_locked_database_is_503(make_settings: Callable[..., Settings], new_client: Any) -> None:
    with new_client(make_settings(busy_seconds=0.2)) as client:
        database = open_database(make_settings().data_dir)
        with database.write() as session:
            session.connection()
            response = client.post("/api/v1/jobs", json=BODY)
            assert client.get("/api/v1/jobs").status_code == 200
        database.close()
    assert response.status_code == 503
    assert response.headers["retry-after"] == "5"


def test_health(client: TestClient) -> None:
    assert client.get("/healthz").json()["status"] == "ok"
    ready = client.get("/readyz")
    assert ready.status_code == 503
    assert ready.json()["checks"] == {"database": "ok", "worker": "not heard of", "disk": "ok"}
    client.post("/api/v1/jobs", json=BODY)
    assert 'remat_jobs{status="queued"} 1' in client.get("/metrics").text


def test_the_reference_lists_every_route(client: TestClient) -> None:
    page = client.get("/api/docs", headers={"Accept": "text/html"}).text
    document = client.get("/api/openapi.json").json()
    for path in document["paths"]:
        assert path.replace("{", "{") in page
    assert json.dumps(document)
