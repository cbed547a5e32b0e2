"""A small client of the REST API, on the standard library alone.

client = Client("http://127.0.0.1:8000")
job = client.submit({"model": "gpt-tiny"}, vary={"checkpointing": ["none", "per-layer"]})
for run in client.wait(job["id"]):
    print(run["spec"]["checkpointing"], run["memory"]["device_peak_bytes"])
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit
from urllib.request import Request, urlopen

from app.errors import Refused, Unreachable
from engine.errors import SpecError

Json = dict[str, Any]
JOB_ID = re.compile(r"[0-9a-f]{32}")


class Client:
    """One server. Methods raise Refused or Unreachable; SpecError for a `url`, a `key` or an id that cannot be sent."""

    def __init__(self, url: str = "http://127.0.0.1:8000", token: str | None = None, timeout: float = 60.0) -> None:
        if not _is_web_address(url):
            raise SpecError("url", f"must be like http://127.0.0.1:8000, not {url[:100]!r}")
        self.url, self.token, self.timeout = url.rstrip("/"), token, timeout

    def predict(self, spec: Mapping[str, Any], method: str = "closed-form") -> Json:
        """A RunResult."""
        return self._json("POST", "/predictions", {"spec": spec, "method": method})

    def submit(
        self, spec: Mapping[str, Any], vary: Mapping[str, Sequence[Any]] | None = None, *, key: str | None = None,
        **more: Any,
    ) -> Json:  # fmt: skip
        """Queue a job (`name`, `method`, `timeout_seconds`, `priority` by keyword). The same `key` is the same job."""
        if key and not (key.isascii() and key.isprintable()):
            raise SpecError("key", "must be printable ASCII")
        headers = {"Idempotency-Key": key} if key else {}
        return self._json("POST", "/jobs", {"spec": spec, "vary": vary or {}, **more}, headers)

    def job(self, job_id: str) -> Json:
        return self._json("GET", _job_path(job_id))

    def jobs(self, status: str | None = None, limit: int = 50) -> list[Json]:
        """Newest first."""
        query = {"limit": limit} | ({"status": status} if status else {})
        found: list[Json] = self._json("GET", f"/jobs?{urlencode(query)}")["items"]
        return found

    def log(self, job_id: str, after: int = 0) -> Json:
        """{"lines", "next_after"}"""
        return self._json("GET", f"{_job_path(job_id)}/log?after={after}")

    def cancel(self, job_id: str) -> Json:
        return self._json("POST", f"{_job_path(job_id)}/cancel")

    def retry(self, job_id: str) -> Json:
        return self._json("POST", f"{_job_path(job_id)}/retry")

    def runs(self, **filters: Any) -> Iterator[Json]:
        """Every matching result, page by page."""
        cursor = None
        while True:
            query = {**filters, "limit": 200} | ({"cursor": cursor} if cursor else {})
            page = self._json("GET", f"/runs?{urlencode(query, doseq=True)}")
            yield from page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def tradeoff(self, **filters: Any) -> Json:
        return self._json("GET", f"/tradeoff?{urlencode(filters, doseq=True)}")

    def export(self, format: str, **filters: Any) -> bytes:
        """Results as `csv`, `parquet` or `json`."""
        return self._send("GET", f"/runs?{urlencode({**filters, 'format': format}, doseq=True)}")

    def wait(self, job_id: str, poll_seconds: float = 0.5) -> list[Json]:
        """The job's results once it has ended."""
        while self.job(job_id)["finished_at"] is None:
            time.sleep(poll_seconds)
        return list(self.runs(job_id=job_id, sort="created_at"))

    def _json(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Json:
        answer = _object(self._send(method, path, body, headers))
        if not answer:
            raise Unreachable(f"{self.url} answers, but not as Remat does")
        return answer

    def _send(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> bytes:
        sent = {"Accept": "application/json", **(headers or {})}
        if self.token:
            sent["Authorization"] = f"Bearer {self.token}"
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            sent["Content-Type"] = "application/json"
        request = Request(f"{self.url}/api/v1{path}", data, sent, method=method)
        try:
            with urlopen(request, timeout=self.timeout) as response:
                content: bytes = response.read()
                return content
        except HTTPError as error:
            raise Refused(error.code, _object(error.read())) from None
        except (OSError, HTTPException) as error:  # URLError is an OSError
            raise Unreachable(f"{self.url} does not answer: {getattr(error, 'reason', error)}") from None


def _job_path(job_id: str) -> str:
    check_job_id(job_id)
    return f"/jobs/{job_id}"


def check_job_id(job_id: str) -> None:
    """Raises SpecError for what no job's id can be."""
    if not JOB_ID.fullmatch(job_id):
        raise SpecError(
            "job_id", f"no job {job_id[:100]!r}: an id is 32 hexadecimal digits, as `remat jobs list` shows"
        )


def _is_web_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            url.isascii()
            and url.isprintable()
            and parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
        )
    except ValueError:  # brackets that do not match, a port that is no number
        return False


def _object(body: bytes) -> Json:
    """The JSON object in `body`; an empty one if it holds none."""
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
