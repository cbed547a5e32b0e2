"""Query parameters: unknown, repeated or impossible ones are refused by name on every route."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

UNKNOWN = [
    *("models", "gpus", "options", "jobs", "runs", "tradeoff", "exercises", "exercises/1"),
    *(f"jobs/{'0' * 32}", f"jobs/{'0' * 32}/log", f"jobs/{'0' * 32}/events"),
    *(f"runs/{'0' * 32}", f"runs/{'0' * 32}/timeline"),
]


@pytest.mark.parametrize("path", UNKNOWN)
def test_unknown_parameters_are_refused_everywhere(client: TestClient, path: str) -> None:
    response = client.get(f"/api/v1/{path}?bogus=1")
    assert response.status_code == 422
    assert [error["field"] for error in response.json()["errors"]] == ["bogus"]


@pytest.mark.parametrize("path", ["jobs", "predictions", "plans", f"jobs/{'0' * 32}/cancel"])
def test_unknown_parameters_are_refused_beside_a_body(client: TestClient, path: str) -> None:
    response = client.post(f"/api/v1/{path}?bogus=1", json={"spec": {"model": "gpt-tiny", "device": "cpu"}})
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "bogus"


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("jobs?limit=5&limit=6", "limit"),
        ("jobs?stauts=failed", "stauts"),
        (f"jobs/{'0' * 32}/log?after=1&after=2", "after"),
        ("runs?sort=created_at&sort=-created_at", "sort"),
        ("tradeoff?x=spec.seq&x=spec.seq", "x"),
    ],
)
def test_what_is_meant_once_is_not_given_twice(client: TestClient, query: str, field: str) -> None:
    response = client.get(f"/api/v1/{query}")
    assert response.status_code == 422
    assert [error["field"] for error in response.json()["errors"]] == [field]


def test_a_list_may_be_repeated(client: TestClient) -> None:
    assert client.get("/api/v1/jobs?status=failed&status=queued&limit=5").status_code == 200
    assert client.get("/api/v1/runs?seq=8&seq=16&method=measured&method=simulated").status_code == 200


@pytest.mark.parametrize(
    "query",
    [
        "limit=0", "limit=-1", "limit=201", "limit=1000000000000000000000000", "cursor=nonsense", "cursor=W10=",
        "sort=nowhere", "sort=-spec", "sort=id;drop", "nowhere=1", "method=guessed", "outcome=fine", "format=xml",
        "seq=x", "seq='%20OR%201=1", "offload_overlap=perhaps", "format=csv&seq=x", "job_id=" + "x" * 3000,
    ],
)  # fmt: skip
def test_bad_queries_are_refused(client: TestClient, query: str) -> None:
    response = client.get(f"/api/v1/runs?{query}")
    assert response.status_code == 422
    assert response.json()["errors"]


@pytest.mark.parametrize(
    "query",
    [
        "seq=nan", "seq=inf", "seq=1e400", "seq=1_0", "seq=%D9%A3", "seq=1.5", "seq=99999999999999999999", "seq=true",
        "seq=none", "dropout=1e400", "dropout=nan", "compile=1", "model=%00", "model=%E2%80%AE", "gpu=%1B",
        "attention=flsh", "job_id=UNKNOWN", "job_id=",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["runs", "tradeoff"])
def test_a_value_that_no_run_can_have_is_refused(client: TestClient, path: str, query: str) -> None:
    response = client.get(f"/api/v1/{path}?{query}")
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"].startswith(query.partition("=")[0])
