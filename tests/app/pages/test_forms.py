"""What the overview and the form of a new benchmark say of input they cannot take, and where they lead instead."""

from __future__ import annotations

import json
import re
from html import unescape

import pytest
from starlette.datastructures import QueryParams
from starlette.testclient import TestClient

from app.pages.form import parse

HTML = {"Accept": "text/html"}
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 256,
}  # fmt: skip


def read(client: TestClient, path: str, status: int = 200) -> str:
    answer = client.get(path, headers=HTML)
    assert answer.status_code == status, (path, answer.text[:300])
    return answer.text


def test_a_refused_form_says_it_once_and_takes_the_focus(client: TestClient) -> None:
    refused = client.post("/jobs/new", data={"model": "llama-2-8b", "seq": "64"}, headers=HTML).text
    assert refused.count("did you mean llama-2-") == 1
    assert refused.count(", mpt-760m,") == 1
    assert re.search(r'id="errors"[^>]* tabindex="-1" autofocus', refused)
    piece = client.get("/jobs/new?model=llama-2-8b", headers={**HTML, "HX-Request": "true"}).text
    assert piece.count("did you mean llama-2-") == 1
    assert "autofocus" not in piece  # someone is typing
    assert read(client, "/?model=llama-2-8b", 422).count("did you mean llama-2-") == 1
    assert read(client, "/?checkpointing=every-0", 422).count("is not accepted") == 1  # a key without a field there


@pytest.mark.parametrize("model", ["", "  "])
def test_a_blank_model_is_an_error_and_an_absent_one_the_default(client: TestClient, model: str) -> None:
    answer = client.post("/jobs/new", data={"model": model, "seq": "64"}, headers=HTML, follow_redirects=False)
    assert answer.status_code == 422
    for page in (answer.text, read(client, f"/?model={model}", 422), read(client, f"/jobs/new?model={model}")):
        assert re.search(r'id="model-error">name a model', page)
    assert client.get(f"/calculator.json?model={model}").json()["errors"]["model"].startswith("name a model")
    pasted = {"model": model, "model_config": json.dumps(LLAMA)}
    assert client.post("/jobs/new", data=pasted, headers=HTML, follow_redirects=False).status_code == 303
    assert "name a model" not in read(client, "/") + read(client, "/jobs/new?seq=64")


def test_a_blank_number_is_what_its_field_says(client: TestClient) -> None:
    rows = client.get("/calculator.json?micro_batch=&seq=").json()["rows"]
    assert {(row["result"]["spec"]["micro_batch"], row["result"]["spec"]["seq"]) for row in rows} == {(1, 512)}
    typed = client.get("/?gpu=", headers={**HTML, "HX-Request": "true"})
    assert typed.headers["HX-Push-Url"] == "/?gpu="  # reloaded, it is still blank


def test_a_model_without_a_closed_form_leads_to_its_simulation(client: TestClient) -> None:
    page = read(client, "/?model=t5-base")
    assert page.count("has no closed form") == 1
    assert 'hx-trigger="load"' not in page  # nor a plan that would say it again
    assert "has no closed form" in read(client, "/plan?model=t5-base", 422)
    for found in (page, read(client, "/plan?model=t5-base", 422)):
        targets = re.findall(r'href="(/jobs/new\?[^"]*method=simulated[^"]*)"', found)
        form = read(client, unescape(targets[0]))
        assert re.search(r'value="simulated" selected', form)
        assert "Not ready" not in form


@pytest.mark.parametrize(("model", "said"), [("llama-3.2-1b", True), ("gemma-2-2b", True), ("gpt-tiny", False)])
def test_the_overview_says_whose_decoder_it_counts(client: TestClient, model: str, said: bool) -> None:
    page = read(client, f"/?model={model}&seq=512")
    line = re.search(r'id="own-decoder">.*?href="([^"]*)"', page)
    assert bool(line) == said
    if line:
        query = parse(QueryParams(unescape(line[1]).partition("?")[2]))
        assert query.payload["method"] == "simulated"
        assert {spec.runs_transformers for spec in query.runs} == {True}
        assert {spec.checkpointing for spec in query.runs} == {"none", "per-layer"}


def test_the_catalog_counts_what_a_run_at_the_default_sequence_has(client: TestClient) -> None:
    counts = {model["name"]: model["parameters"] for model in client.get("/api/v1/models").json()}
    run = client.post("/api/v1/predictions", json={"spec": {"model": "gpt-tiny"}}).json()
    assert counts["gpt-tiny"] == run["parameters"] == 5_387_776
    assert re.search(r'>gpt-tiny</th><td class="num">5.39 M<', read(client, "/about"))


@pytest.mark.parametrize(
    ("path", "message"), [("/jobs?status=bad", "must be one of queued,"), (f"/jobs?before={'x' * 65}", "at most 64")]
)
def test_an_error_page_says_it_once(client: TestClient, path: str, message: str) -> None:
    assert read(client, path, 422).count(message) == 1


def test_accuracy_has_parts_below_their_totals_and_times_to_read(client: TestClient) -> None:
    page = read(client, "/accuracy")
    assert re.search(r"on \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\.", page)
    assert "the bias is the median with its sign" in page
    published = page[page.index('id="published"') : page.index('id="speed"')]
    heads = re.findall(r'<th scope="row" (class="muted")?>(?:&emsp;)?([^<]*)</th><td class="num">\d', published)
    assert [head for _, head in heads[:6]] == [
        *("reserved", "of these, eager", "of these, compiled"),
        *("allocated", "of these, eager", "of these, compiled"),
    ]
    assert ">H100, eager<" in page  # a group without a total stands for itself
