"""The same job as a person would send it without the page: curl, Python, the command line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from app.fields import spell

Payload = Mapping[str, Any]


def as_curl(payload: Payload, base_url: str) -> str:
    body = shlex.quote(json.dumps(payload))
    return f"curl {shlex.quote(f'{base_url}/api/v1/jobs')} \\\n  -H 'Content-Type: application/json' \\\n  -d {body}"


def as_python(payload: Payload, base_url: str) -> str:
    """Standard library only, so that it runs wherever it is pasted."""
    return (
        "import json\nfrom urllib.request import Request, urlopen\n\n"
        f"job = json.loads({json.dumps(payload)!r})\n"
        f"request = Request({f'{base_url}/api/v1/jobs'!r}, json.dumps(job).encode(), "
        '{"Content-Type": "application/json"})\n'
        'print(json.load(urlopen(request))["id"])'
    )


def as_cli(payload: Payload) -> str:
    """`remat measure` (or predict) with a comma-separated list for each field that varies."""
    method = payload.get("method", "measured")
    words = ["remat", "measure"] if method == "measured" else ["remat", "predict", "--method", method]
    flags = dict(payload["spec"]) | {key: list(values) for key, values in (payload.get("vary") or {}).items()}
    for key, value in flags.items():
        words += [f"--{key.replace('_', '-')}", _flag(value)]
    return " ".join(shlex.quote(word) for word in words)


def _flag(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(_flag(item) for item in value)
    if isinstance(value, Mapping):
        return "config.json"
    return spell(value)
