"""The copied commands say the same job as the form."""

import json
import shlex

import pytest

from app.fields import OPTIONAL
from app.flags import grid
from app.pages.commands import as_cli, as_curl, as_python
from app.pages.form import draft, query_of
from engine.spec import expand

PAYLOADS = {
    "grid": {
        "spec": {"model": "gpt-tiny", "seq": 64},
        "vary": {"attention": ["flash", "standard"]},
        "method": "measured",
    },
    "quotes": {"spec": {"model": 'it\'s; rm -rf "/" $(x)'}, "vary": {}, "method": "simulated"},
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
def test_curl_sends_the_payload(payload: dict[str, object]) -> None:
    words = shlex.split(as_curl(payload, "http://localhost:8000").replace("\\\n", ""))
    assert json.loads(words[words.index("-d") + 1]) == payload


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
def test_python_sends_the_payload(payload: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    sent = {}

    class Answer:
        def read(self) -> bytes:
            return b'{"id": "1"}'

    def urlopen(request: object) -> Answer:
        sent["body"] = json.loads(request.data)  # type: ignore[attr-defined]  # urllib's Request
        return Answer()

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    exec(compile(as_python(payload, "http://localhost:8000"), "copied", "exec"), {})
    assert sent["body"] == payload


def test_the_command_line_varies_what_the_form_varies() -> None:
    words = shlex.split(as_cli(PAYLOADS["grid"]))
    assert words == ["remat", "measure", "--model", "gpt-tiny", "--seq", "64", "--attention", "flash,standard"]
    assert shlex.split(as_cli(PAYLOADS["quotes"]))[:4] == ["remat", "predict", "--method", "simulated"]


def test_a_form_and_its_payload_are_the_same_grid() -> None:
    made = draft({"model": ["gpt-tiny llama-tiny"], "seq": ["64, 128"], "compile": ["false"], "dropout": ["0.1"]})
    assert not made.errors
    assert expand(made.payload["spec"], made.payload["vary"]) == made.runs
    assert len(made.runs) == 4


@pytest.mark.parametrize("key", sorted(OPTIONAL))
def test_an_absent_value_survives_the_command_and_the_address(key: str) -> None:
    """`none` beside a real value, as a job varies it: the page's command and its Duplicate link mean the same job."""
    values = [None, {"gpu": "t4"}.get(key, 1.5)]
    job = {"spec": {"model": "gpt-tiny"}, "vary": {key: values}, "method": "measured"}
    words = shlex.split(as_cli(job))
    assert grid({key: words[words.index(f"--{key.replace('_', '-')}") + 1]}) == ({}, {key: values})
    again = draft(query_of(job["spec"], job["vary"]))
    assert (again.errors, again.payload["vary"]) == ({}, {key: values})
