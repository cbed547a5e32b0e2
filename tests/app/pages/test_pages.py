"""Every page for every state of the database, and what a form does with bad input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.db import runs
from app.db.session import Database
from app.main import create_app
from app.pages.comparison import number_rows
from app.pages.form import EXAMPLE, form_fields
from app.pages.labels import facts, job_summary, run_label
from app.settings import Settings
from engine.result import Memory, RunResult, Timing
from engine.spec import RunSpec

HTML = {"Accept": "text/html"}
STATES = {
    "zero runs": None,
    "one run": ("ok",),
    "only failed": ("failed",) * 6,
    "all out of memory": ("oom",) * 6,
    "all ok": ("ok",) * 6,
    "mixed": ("ok", "oom", "failed", "ok", "ok", "ok"),
}
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'"


class Scripts(HTMLParser):
    """Collects what a strict policy forbids: inline code, event attributes, style attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.images = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "script" and "src" not in named and named.get("type") != "application/json":
            self.found.append("inline script")
        self.found += [f"{tag} {name}" for name in named if name.startswith(("on", "hx-on")) or name == "style"]
        self.found += ["style element"] * (tag == "style")
        self.images += tag == "img"


def read(client: TestClient, path: str, status: int = 200) -> str:
    """The page's text, checked for what no page may hold."""
    answer = client.get(path, headers=HTML)
    assert answer.status_code == status, (path, answer.text[:300])
    assert answer.headers["content-type"].startswith("text/html")
    scripts = Scripts()
    scripts.feed(answer.text)
    assert not scripts.found, path
    assert not scripts.images, path
    return answer.text


@pytest.fixture(params=STATES.values(), ids=STATES.keys())
def state(request: pytest.FixtureRequest, store: Callable[..., str]) -> str | None:
    return store(request.param, name=HOSTILE, status="failed") if request.param else None


def test_every_page_of_every_state(client: TestClient, database: Database, state: str | None) -> None:
    drawn = "/explore?log_x=1&log_y=1&colour=model"
    for path in ("/", "/jobs", "/jobs/new", "/explore", "/runs", "/about", "/accuracy", drawn):
        read(client, path)
    if state:
        assert HOSTILE not in read(client, f"/jobs/{state}")
        read(client, f"/explore?job_id={state}&x=timing.step_seconds&y=memory.saved_activation_bytes")
        with database.read() as session:
            ids = [run["id"] for run in runs.every(session, runs.Filters())]
        for run_id in ids:
            read(client, f"/runs/{run_id}")
        read(client, "/compare?" + "&".join(f"ids={run_id}" for run_id in ids[:6]), 200 if len(ids) > 1 else 422)


ANOTHER = {
    "model": {"model_type": "llama"}, "mode": "inference", "checkpointing": "sqrt", "precision": "fp32",
    "attention": "standard", "optimizer": "sgd", "loss": "fused", "sharding": "zero-3", "device": "cpu",
    "gpu": "t4", "max_grad_norm": 1.0, "memory_limit_gib": 0.5, "dropout": 0.1, "compile": True,
    "offload_overlap": False, "offload_optimizer": "cpu", "offload_parameters": "cpu", "offload_activations": "cpu",
}  # fmt: skip


def test_different_specifications_never_share_a_label() -> None:
    """Each differs from the default in one field, whichever it is; a wider list of differences tells them apart too."""
    default = RunSpec().model_dump()
    specs = [default, *(default | {key: ANOTHER.get(key, 3)} for key in form_fields())]
    specs.append(default | {"model": {"model_type": "llama", "hidden_size": 64}})
    for vary in ([], list(form_fields())):
        labels = [run_label(spec, vary) for spec in specs]
        assert len(set(labels)) == len(specs)
    assert run_label(default) == "gpt-tiny · none · flash · batch 1 · seq 512"
    serial = default | {"offload_optimizer": "cpu", "offload_overlap": False}
    assert run_label(serial) == run_label(default) + " · optimizer on cpu · overlap false"
    assert run_label(serial, ["offload_optimizer", "offload_overlap"]) == "optimizer on cpu · overlap false"
    assert run_label(default, ["offload_optimizer"]) == "offload optimizer none"
    summaries = [job_summary(spec, {"seq": [1, 2]}) for spec in specs if spec["seq"] == default["seq"]]
    assert len(set(summaries)) == len(summaries)


NOTHING_TO_DRAW = {
    "all out of memory": (("oom",) * 6, "", "None of these runs has tokens per second: all ran out of memory."),
    "only failed": (("failed",) * 6, "", "None of these runs has tokens per second: all failed."),
    "never known": (("ok",) * 6, "&y=timing.mfu", "None of these runs has model FLOPs utilisation."),
    "not on the x axis": (("ok", "oom"), "&x=memory.device_reserved_bytes", "None of these runs has reserved memory."),
}


@pytest.mark.parametrize(("outcomes", "axes", "why"), NOTHING_TO_DRAW.values(), ids=NOTHING_TO_DRAW.keys())
def test_a_chart_without_a_point_says_why(
    client: TestClient, store: Callable[..., str], outcomes: tuple[str, ...], axes: str, why: str
) -> None:
    job = store(outcomes, status="failed")
    for path in (f"/explore?job_id={job}{axes}", *([] if axes else [f"/jobs/{job}"])):
        page = read(client, path)
        assert why in page
        assert "data-figure" not in page
        assert "★" not in page
    assert "data-figure" in read(client, f"/jobs/{store(('ok', 'oom'))}")


def test_the_star_is_explained_where_it_is_shown(client: TestClient, store: Callable[..., str]) -> None:
    assert "★" not in read(client, f"/jobs/{store(('ok', 'oom'))}")


def test_facts_on_which_a_jobs_runs_differ_are_all_told() -> None:
    runs = [{"torch": "2.13", "attention_kernel": kernel, "disk": None} for kernel in ("standard", "flash", "flash")]
    assert facts(*runs) == [("torch", "2.13"), ("attention kernel", "standard, flash")]
    assert facts() == []


def test_a_lists_labels_say_what_its_runs_differ_in(client: TestClient, store: Callable[..., str]) -> None:
    store(("ok",) * 6)
    labels = re.findall(r'aria-label="Compare ([^"]*)"', read(client, "/runs"))
    assert len(set(labels)) == 6
    assert "gpt-tiny · none · standard · batch 2 · seq 256" in labels
    assert len(set(re.findall(r'aria-label="Compare ([^"]*)"', read(client, "/explore")))) == 6


def test_first_run_offers_the_example_and_it_works(client: TestClient) -> None:
    page = read(client, "/")
    assert "Run the example" in page
    fields = re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', page)
    data: dict[str, list[str]] = {}
    for name, value in fields:
        data.setdefault(name, []).append(value)
    answer = client.post("/jobs/new", data=data, headers=HTML, follow_redirects=False)
    assert answer.status_code == 303
    job = client.get("/api/v1" + answer.headers["location"]).json()
    assert (job["runs_total"], job["status"], job["name"]) == (6, "queued", "First example")
    assert job["vary"] == {key: EXAMPLE[key] for key in ("checkpointing", "attention")}


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 256,
}  # fmt: skip

BAD = {
    "model": ("nonsense", "unknown model"),
    "micro_batch": ("0", "greater than or equal to 1"),
    "seq": ("1.5", "valid integer"),
    "checkpointing": ("every-0", "is not accepted"),
    "precision": ("int4", "bf16-mixed"),
    "dropout": ("nan", "finite"),
    "memory_limit_gib": ("-1", "greater than 0"),
    "seed": ("9" * 5000, "integer"),
    "gpu": ("voodoo2", "unknown GPU"),
    "timeout_seconds": ("0", "from 1 to"),
    "model_config": ("{", "not a JSON document"),
    "method": ("guessed", "one of measured"),
    "name": ("a\x00b", "printable"),
    "prefill_chunk": ("8", "needs mode=inference"),
}


@pytest.mark.parametrize("field", BAD)
def test_a_refused_form_says_why_beside_the_field(client: TestClient, field: str) -> None:
    value, message = BAD[field]
    answer = client.post("/jobs/new", data={"model": "gpt-tiny", field: value}, headers=HTML)
    assert answer.status_code == 422
    beside = re.search(rf'id="{field}-error">(.*?)</span>', answer.text, re.S)
    assert beside, answer.text[:2000]
    assert message in beside[1]
    assert client.get("/api/v1/jobs").json()["items"] == []


@pytest.mark.parametrize(
    "odd",
    ["NaN", "1e999", '"\\ud800"', '"\\u0000"', "[" * 900 + "]" * 900, "9" * 300, '1, "odd": 2'],
    ids=["nan", "infinite", "half a character", "control character", "deep", "long number", "key twice"],
)
def test_a_pasted_config_is_as_strict_as_the_api(client: TestClient, odd: str) -> None:
    """What could be stored, but not answered again as JSON."""
    config = json.dumps(LLAMA)[:-1] + f', "odd": {odd}}}'
    answer = client.post("/jobs/new", data={"model_config": config}, headers=HTML, follow_redirects=False)
    assert answer.status_code == 422
    assert "not a JSON document" in answer.text
    assert client.get("/api/v1/jobs").json()["items"] == []


def test_a_form_sent_twice_is_one_job_and_a_changed_one_another(client: TestClient) -> None:
    form = {"model": "gpt-tiny", "seq": "64", "idempotency_key": "0" * 32}
    sent = [client.post("/jobs/new", data=form, follow_redirects=False).headers["location"] for _ in range(2)]
    changed = client.post("/jobs/new", data={**form, "seq": "65"}, follow_redirects=False).headers["location"]
    assert sent[0] == sent[1] != changed


def test_the_query_is_the_state_of_the_form(client: TestClient) -> None:
    page = read(client, "/jobs/new?model=llama-tiny&seq=64&seq=128&checkpointing=every-2&optimizer=sgd")
    assert 'value="llama-tiny"' in page
    assert 'value="64, 128"' in page
    assert 'value="every-2"' in page
    assert re.search(r'value="sgd" checked', page)
    assert "2 runs" in page


def test_cancel_and_retry_lead_back_to_the_job(client: TestClient) -> None:
    place = client.post("/jobs/new", data={"model": "gpt-tiny"}, follow_redirects=False).headers["location"]
    assert 'class="tag queued"' in read(client, place)
    assert client.post(f"{place}/cancel", follow_redirects=False).headers["location"] == place
    assert 'class="tag cancelled"' in read(client, place)
    assert client.post(f"{place}/retry", follow_redirects=False).status_code == 303
    assert 'class="tag queued"' in read(client, place)
    assert client.post("/jobs/nothing/cancel", headers=HTML).status_code == 404


def test_htmx_gets_the_piece_it_asked_for(client: TestClient) -> None:
    whole, piece = read(client, "/"), client.get("/?seq=2048", headers={"HX-Request": "true"})
    assert "<html" in whole
    assert "<html" not in piece.text
    assert "<table" in piece.text
    assert piece.headers["vary"] == "HX-Request"
    assert piece.headers["hx-push-url"] == "/?seq=2048"


@pytest.mark.parametrize(
    ("path", "status"),
    [("/nowhere", 404), ("/jobs/zz", 404), ("/runs/zz", 404), ("/jobs?status=odd", 422), ("/runs?sort=odd", 422),
     ("/runs?outcome=odd", 422),
     ("/explore?x=odd", 422), ("/compare", 422), ("/compare?ids=a,b", 404), ("/?seq=0", 422), ("/?seq=1&seq=2", 200)],
)  # fmt: skip
def test_a_browser_is_told_in_a_page(client: TestClient, path: str, status: int) -> None:
    assert "<main" in read(client, path, status)


def test_a_program_is_told_in_a_problem_document(client: TestClient) -> None:
    answer = client.get("/nowhere")
    assert answer.headers["content-type"] == "application/problem+json"
    assert client.get("/api/v1/nowhere", headers=HTML).headers["content-type"] == "application/problem+json"


def test_machine_forms_follow_the_page(client: TestClient, store: Callable[..., str]) -> None:
    job = store(("ok",) * 6)
    assert client.get("/runs.json?attention=flash").json()["items"][0]["spec"]["attention"] == "flash"
    assert client.get("/runs.csv?attention=flash").text.count("\n") == 4
    assert len(client.get(f"/explore.json?job_id={job}&log_x=1").json()["points"]) == 6
    assert client.get(f"/jobs/{job}.json").json()["id"] == job
    assert client.get("/jobs.json").json()["items"][0]["id"] == job
    rows = client.get("/calculator.json?model=gpt-tiny").json()["rows"]
    assert rows[0]["result"]["method"] == "closed-form"


def test_filters_and_sorting_of_the_list(client: TestClient, store: Callable[..., str]) -> None:
    store(("ok", "oom", "ok", "ok", "ok", "failed"))
    assert read(client, "/runs?outcome=oom").count('name="ids"') == 1
    assert read(client, "/runs?attention=flash").count('name="ids"') == 3
    assert 'aria-sort="descending"' in read(client, "/runs?sort=-memory.device_peak_bytes")
    assert "No run matches" in read(client, "/runs?model=mistral-7b-v0.1")


def test_columns_that_no_listed_run_fills_are_left_out(client: TestClient, store: Callable[..., str]) -> None:
    store(("ok", "oom"))
    utilisation = ">Model FLOPs utilisation</a>"
    assert utilisation not in read(client, "/runs")
    assert utilisation in read(client, "/runs?sort=-timing.mfu")
    assert ">Step time</a>" in read(client, "/runs")
    assert ">Step time</a>" not in read(client, "/runs?outcome=oom")


def test_a_runs_page_tells_the_timeline_from_the_timing(
    client: TestClient, database: Database, store: Callable[..., str]
) -> None:
    store(("ok",))
    with database.read() as session:
        run = next(iter(runs.every(session, runs.Filters())))
    page = read(client, f"/runs/{run['id']}")
    assert "a pass of its own that follows every allocation" in page
    assert "besides the parameters and optimizer states that were there before the step" in page
    assert "3 × 167 B" in page
    assert "not listed" not in page


def test_only_rates_are_judged_between_steps_of_unequal_tokens() -> None:
    """Twice the tokens take longer and need more: neither is worse."""

    def run(micro_batch: int, peak: int, seconds: float, speed: float) -> dict[str, Any]:
        spec = RunSpec(micro_batch=micro_batch)
        memory, timing = Memory(device_peak_bytes=peak), Timing(step_seconds=seconds, tokens_per_second=speed)
        made = RunResult(
            spec=spec, spec_hash=spec.spec_hash, method="measured", outcome="ok", memory=memory, timing=timing
        )
        return made.model_dump(mode="json")

    base, more = run(1, 10**9, 0.5, 1000.0), run(8, 2 * 10**9, 2.0, 2000.0)
    rows = {row.label: row.cells[1] for row in number_rows([base, more])}
    assert (rows["Step time"].verdict, rows["Step time"].delta) == ("same", "+300.0%")
    assert rows["Peak memory"].verdict == "same"
    assert rows["Tokens per second"].verdict == "better"
    more["spec"] = base["spec"]
    rows = {row.label: row.cells[1] for row in number_rows([base, more])}
    assert (rows["Step time"].verdict, rows["Peak memory"].verdict) == ("worse", "worse")


def test_cards_without_bf16_say_so(client: TestClient) -> None:
    row = re.search(r'<tr><th scope="row">T4</th>.*?</tr>', read(client, "/about"))
    assert row
    assert "none; fp16 65.00 TFLOP/s" in row[0]


def test_masked_scores_of_the_tile_at_work_are_dashes(client: TestClient) -> None:
    page = read(client, "/learn/flash")
    assert '<td class="tile-now">–</td>' in page
    assert '<td class="tile-now"></td>' not in page


def test_the_proxy_prefix_is_on_every_link(settings: Settings) -> None:
    with TestClient(create_app(settings), base_url="http://localhost", root_path="/remat") as client:
        page = client.get("/", headers=HTML).text
    links = re.findall(r'(?:href|src|action|hx-get)="(/[^"]*)"', page)
    assert len(links) > 20
    assert [link for link in links if not link.startswith("/remat")] == []
