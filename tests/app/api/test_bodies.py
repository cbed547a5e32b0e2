"""Bytes that no client library sends. Each must be a 4xx problem that names the fault and repeats nothing of it."""

from __future__ import annotations

import json

import pytest
from starlette.testclient import TestClient

SPEC = b'{"spec": {"model": "gpt-tiny", "device": "cpu"%s}}'
JSON = {"Content-Type": "application/json"}

BODIES = {
    "empty": b"",
    "not json": b"spec=1",
    "a list": b"[]",
    "null": b"null",
    "NaN": SPEC % b', "dropout": NaN',
    "Infinity": SPEC % b', "dropout": -Infinity',
    "1e999": SPEC % b', "dropout": 1e999',
    "huge integer": SPEC % (b', "seq": ' + b"9" * 4000),
    "beyond Python's digits": SPEC % (b', "seq": ' + b"9" * 10_000),
    "integer beyond 64 bits": SPEC % b', "seq": 99999999999999999999',
    "lone surrogate as value": SPEC % b', "gpu": "\\ud800"',
    "lone surrogate as key": SPEC % b', "\\ud800": 1',
    "lone surrogate in a config": b'{"spec": {"model": {"model_type": "\\udfff"}}}',
    "NaN in a config": b'{"spec": {"model": {"model_type": "llama", "rope_theta": NaN}}}',
    "NUL": SPEC % b', "gpu": "a\\u0000b"',
    "not UTF-8": SPEC % b', "gpu": "\xff\xfe"',
    "duplicate key": SPEC % b', "seq": 8, "seq": 16',
    "deep": b'{"spec": ' + b'{"model":' * 200 + b"1" + b"}" * 201,
    "very deep": b"[" * 100_000,
    "unknown key": SPEC % b', "micro_batches": 1',
    "zero": SPEC % b', "seq": 0',
    "negative": SPEC % b', "micro_batch": -1',
    "fraction": SPEC % b', "seq": 1.5',
    "true as a number": SPEC % b', "seq": true',
    "text as a number": SPEC % b', "seq": "512"',
    "every-0": SPEC % b', "checkpointing": "every-0"',
    "unknown model": b'{"spec": {"model": "nope"}}',
    "model of no shape": b'{"spec": {"model": "gpt:0,0,0"}}',
    "model with an empty config": b'{"spec": {"model": {}}}',
    "two fields at odds": SPEC % b', "mode": "inference", "checkpointing": "per-layer"',
    "path as a model": b'{"spec": {"model": "../../etc/passwd"}}',
    "address as a model": b'{"spec": {"model": "http://169.254.169.254/"}}',
}
ONLY_JOBS = {
    "vary is no list": b'{"spec": {}, "vary": {"seq": 8}}',
    "vary of an unknown field": b'{"spec": {}, "vary": {"sequence": [8]}}',
    "vary without values": b'{"spec": {}, "vary": {"seq": []}}',
    "too many runs": b'{"spec": {}, "vary": {"seq": [' + b",".join(b"%d" % n for n in range(1, 600)) + b"]}}",
    "unknown method": b'{"spec": {}, "method": "guessed"}',
    "name of two lines": b'{"spec": {}, "name": "a\\nb"}',
    "name too long": b'{"spec": {}, "name": "' + b"x" * 300 + b'"}',
    "no time": b'{"spec": {}, "timeout_seconds": 0}',
    "priority as text": b'{"spec": {}, "priority": "high"}',
    "unknown field": b'{"spec": {}, "colour": 1}',
    "spec is text": b'{"spec": "gpt-tiny"}',
}


def refused(client: TestClient, path: str, body: bytes, headers: dict[str, str] = JSON) -> dict[str, object]:
    response = client.post(path, content=body, headers=headers)
    assert 400 <= response.status_code < 500, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, object] = json.loads(response.content)
    assert problem["status"] == response.status_code
    assert problem["detail"]
    return problem


@pytest.mark.parametrize("path", ["/api/v1/jobs", "/api/v1/predictions"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_bad_bodies_are_refused(client: TestClient, path: str, body: bytes) -> None:
    refused(client, path, body)
    assert client.get("/api/v1/jobs").json()["items"] == []


@pytest.mark.parametrize("body", ONLY_JOBS.values(), ids=ONLY_JOBS.keys())
def test_bad_jobs_are_refused(client: TestClient, body: bytes) -> None:
    refused(client, "/api/v1/jobs", body)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        pytest.param(BODIES["zero"], "seq", id="zero"),
        pytest.param(BODIES["unknown key"], "micro_batches", id="unknown key"),
        pytest.param(BODIES["every-0"], "checkpointing", id="every-0"),
        pytest.param(BODIES["two fields at odds"], "checkpointing, mode", id="two fields"),
        pytest.param(BODIES["unknown model"], "model", id="model"),
    ],
)
@pytest.mark.parametrize("path", ["/api/v1/jobs", "/api/v1/predictions"])
def test_the_field_at_fault_is_named(client: TestClient, path: str, body: bytes, field: str) -> None:
    errors = refused(client, path, body)["errors"]
    assert isinstance(errors, list)
    assert field in errors[0]["field"]
    assert errors[0]["message"]


def test_ten_megabytes_are_too_large(client: TestClient) -> None:
    problem = refused(client, "/api/v1/jobs", b" " * 10 * 2**20)
    assert problem["status"] == 413


def test_ten_megabytes_of_unknown_length_are_too_large(client: TestClient) -> None:
    response = client.post("/api/v1/jobs", content=(b" " * 2**20 for _ in range(10)), headers=JSON)
    assert response.status_code == 413


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/xml"])
def test_other_content_types_are_refused(client: TestClient, content_type: str | None) -> None:
    refused(client, "/api/v1/jobs", SPEC % b"", {"Content-Type": content_type} if content_type else {})


def test_input_is_never_repeated(client: TestClient) -> None:
    secret = "do-not-repeat-this"
    for body in ({"spec": {"seq": secret}}, {"spec": {}, "priority": secret}, {"spec": {}, "timeout_seconds": secret}):
        response = client.post("/api/v1/jobs", json=body)
        assert response.status_code == 422
        assert secret not in response.text


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("plans", {"spec": {}, "gpu": "t4", "host_memory_gib": True}, "host_memory_gib"),
        ("plans", {"spec": {}, "gpu": "t4", "nvme_gib": "1"}, "nvme_gib"),
        ("jobs", {"spec": {}, "timeout_seconds": True}, "timeout_seconds"),
        ("jobs", {"spec": {}, "name": "two\nlines"}, "name"),
        ("jobs", {"spec": {}, "name": "right to left \u202e"}, "name"),
        ("jobs", {"spec": {}, "name": "invisible\u200b"}, "name"),
        ("exercises/1/check", {"answer": "9" * 5000}, "answer"),
        ("exercises/1/check", {"answer": True}, "answer"),
        ("exercises/1/check", {"answer": [1]}, "answer"),
        ("exercises/1/check", {"answer": 1, "inputs": {"layers": []}}, "inputs.layers"),
    ],
)
def test_a_number_is_a_number_and_its_field_goes_by_its_own_name(
    client: TestClient, path: str, body: dict[str, object], field: str
) -> None:
    """true is no number, and a field of several types is not named by what pydantic calls them."""
    answer = client.post(f"/api/v1/{path}", json=body)
    assert answer.status_code == 422
    assert {error["field"] for error in answer.json()["errors"]} == {field}
