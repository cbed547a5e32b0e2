from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.security import COOKIE
from app.settings import Settings

BODY = {"spec": {"model": "gpt-tiny", "device": "cpu"}}
TOKEN = "a-token-of-sufficient-length"


@pytest.fixture
def guarded(make_settings: Callable[..., Settings], new_client: Any) -> Iterator[TestClient]:
    """A client of a server with a token."""
    with new_client(make_settings(token=TOKEN)) as made:
        yield made


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1", "[::1]:8000", "[::1]"])
def test_own_names_are_served(client: TestClient, host: str) -> None:
    assert client.get("/api/v1/jobs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "evil.example:8000", "[::2]", ""])
def test_a_rebound_name_is_refused(client: TestClient, host: str) -> None:
    response = client.get("/api/v1/jobs", headers={"Host": host})
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/problem+json"


def test_allowed_hosts_are_served(make_settings: Callable[..., Settings], new_client: Any) -> None:
    with new_client(make_settings(allowed_hosts="remat.example, other")) as client:
        assert client.get("/healthz", headers={"Host": "remat.example:443"}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({}, 202, id="a program"),
        pytest.param({"Sec-Fetch-Site": "same-origin"}, 202, id="own page"),
        pytest.param({"Sec-Fetch-Site": "none"}, 202, id="typed address"),
        pytest.param({"Sec-Fetch-Site": "cross-site"}, 403, id="another site"),
        pytest.param({"Sec-Fetch-Site": "same-site"}, 403, id="a sibling"),
        pytest.param({"Origin": "http://localhost"}, 202, id="own origin"),
        pytest.param({"Origin": "http://localhost:9"}, 403, id="another port"),
        pytest.param({"Origin": "https://evil.example"}, 403, id="another origin"),
        pytest.param({"Origin": "null"}, 403, id="a sandboxed frame"),
        pytest.param({"Origin": "https://evil.example", "Authorization": "Bearer x"}, 202, id="a Bearer token"),
        pytest.param({"Origin": "https://evil.example", "Authorization": "Bearer x", "Cookie": "a=b"}, 403, id="both"),
    ],
)
def test_unsafe_requests_come_from_our_own_pages(client: TestClient, headers: dict[str, str], status: int) -> None:
    assert client.post("/api/v1/jobs", json=BODY, headers=headers).status_code == status


def test_reading_needs_no_origin(client: TestClient) -> None:
    assert client.get("/api/v1/jobs", headers={"Origin": "https://evil.example"}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/api/v1/jobs", "/api/v1/nowhere", "/static/app.css"])
def test_every_answer_carries_the_policy(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe-eval" not in policy
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/static/../app/settings.py", "/static/..%2fapp/settings.py", "/static//etc/passwd"])
def test_nothing_outside_static_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


@pytest.mark.parametrize("path", ["/api/v1/jobs", "/metrics", "/api/openapi.json", "/readyz", "/staticx"])
@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Cookie": f"{COOKIE}={TOKEN}"}]
)
def test_without_the_token_nothing_is_told(guarded: TestClient, path: str, headers: dict[str, str]) -> None:
    response = guarded.get(path, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"


def test_the_token_in_the_address_does_not_count(guarded: TestClient) -> None:
    assert guarded.get(f"/api/v1/jobs?token={TOKEN}").status_code == 401


def test_health_and_static_files_need_no_token(guarded: TestClient) -> None:
    assert guarded.get("/healthz").status_code == 200
    assert guarded.get("/static/app.css").status_code == 200


def test_a_program_sends_the_token(guarded: TestClient) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert guarded.post("/api/v1/jobs", json=BODY, headers=headers).status_code == 202


def test_a_browser_logs_in(guarded: TestClient) -> None:
    sent_away = guarded.get("/", headers={"Accept": "text/html"}, follow_redirects=False)
    assert (sent_away.status_code, sent_away.headers["location"]) == (303, "/login")
    assert "<form" in guarded.get("/login").text
    refused = guarded.post("/login", data={"token": "wrong"})
    assert refused.status_code == 403
    assert "set-cookie" not in refused.headers
    accepted = guarded.post("/login", data={"token": TOKEN}, follow_redirects=False)
    cookie = accepted.headers["set-cookie"]
    assert accepted.status_code == 303
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert TOKEN not in cookie
    assert guarded.get("/api/v1/jobs").status_code == 200


def test_a_reverse_proxy_may_serve_it_under_a_prefix(make_settings: Callable[..., Settings], new_client: Any) -> None:
    with new_client(make_settings(root_path="/remat", token=TOKEN)) as client:
        assert client.get("/remat/healthz").status_code == 200
        assert client.get("/remat/api/v1/jobs").status_code == 401
        headers = {"Authorization": f"Bearer {TOKEN}"}
        job = client.post("/remat/api/v1/jobs", json=BODY, headers=headers)
        assert job.headers["location"] == f"/remat/api/v1/jobs/{job.json()['id']}"
