"""The exercise pages, REST and command line; and each exercise worked through in a real browser."""

import re
from html import unescape
from urllib.parse import parse_qs, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect
from starlette.testclient import TestClient
from typer.testing import CliRunner

from app import cli
from app.pages.mathml import mathml
from engine.exercises import EXERCISES, solve

HTMX = {"HX-Request": "true"}
NONSENSE = ("nan", "inf", "-1", "1e999", "x", "<script>", "\u0000", "9" * 400)


@pytest.mark.parametrize("number", EXERCISES)
def test_a_page_shows_its_answers_steps_and_links(client: TestClient, number: int) -> None:
    text = client.get(f"/exercises/{number}").text
    assert text.count("data-answer=") == len(EXERCISES[number].asked)
    assert text.count("<math") >= 5
    assert "<script>" not in text
    for label in ("Predict this", "Simulate this", "Benchmark a small version"):
        target = re.search(rf'href="([^"]+)">{label}', text)
        assert target
        assert client.get(target[1].replace("&amp;", "&")).status_code == 200


@pytest.mark.parametrize("number", EXERCISES)
def test_a_fragment_is_the_solution_alone(client: TestClient, number: int) -> None:
    answer = client.get(f"/exercises/{number}", headers=HTMX)
    assert answer.text.lstrip().startswith('<div class="stack" id="work">')
    assert answer.headers["vary"] == "HX-Request"


@pytest.mark.parametrize("number", EXERCISES)
@pytest.mark.parametrize("text", NONSENSE, ids=repr)
def test_nonsense_is_a_message_beside_its_field(client: TestClient, number: int, text: str) -> None:
    name = EXERCISES[number].inputs[0].name
    answer = client.get(f"/exercises/{number}", params={name: text})
    assert answer.status_code == 422
    assert f"<strong>{name}</strong>" in answer.text
    assert "<script>" not in answer.text
    assert client.get(f"/api/v1/exercises/{number}", params={name: text}).status_code == 422


def test_a_hidden_solution_opens_once_an_answer_was_tried(client: TestClient) -> None:
    hidden = client.get("/exercises/1?solution=hidden").text
    assert "Step by step" not in hidden
    assert "data-answer" not in hidden
    assert "Step by step" not in client.get("/exercises/1?solution=hidden&answer=many").text
    assert "Step by step" in client.get("/exercises/1?solution=hidden&answer=1+GB&key=per_layer_bytes").text


def test_an_empty_field_is_its_default(client: TestClient) -> None:
    assert client.get("/exercises/1?layers=&batch=4").status_code == 200


def test_ticked_boxes_are_one_strategy(client: TestClient) -> None:
    ticked = client.get("/exercises/5?recompute=&recompute=norms&recompute=dropout").text
    assert "recomputes norms+dropout" in ticked
    assert "recomputes none" in client.get("/exercises/5?recompute=").text


def test_simulated_points_stand_on_the_chart_or_say_why_not(client: TestClient) -> None:
    drawn = client.get("/exercises/2?simulate=points&layers=4")
    assert drawn.status_code in (200, 422)
    assert ("simulated, k = 1" in drawn.text) != ("<strong>simulate</strong>" in drawn.text)
    refused = client.get("/exercises/2?simulate=points&ratio=3")
    assert refused.status_code == 422
    assert "only a real block can be simulated" in refused.text


@pytest.mark.parametrize("path", ["/exercises/0", "/exercises/6", "/exercises/one"])
def test_there_is_no_other_exercise(client: TestClient, path: str) -> None:
    answer = client.get(path, headers={"Accept": "text/html"})
    assert answer.status_code == 404
    assert answer.text.count("There is no such exercise") == 1
    assert all(f"{each.number} ({each.title})" in unescape(answer.text) for each in EXERCISES.values())
    assert client.get(f"/api/v1{path}").status_code in (404, 422)


def test_rest_has_inputs_answers_steps_and_notes(client: TestClient) -> None:
    listed = client.get("/api/v1/exercises").json()
    assert [each["number"] for each in listed] == list(EXERCISES)
    body = client.get("/api/v1/exercises/1?layers=20").json()
    assert body["inputs"]["layers"] == 20
    assert body["answers"] == solve(1, {"layers": 20}).answers
    assert {"text", "formula", "value", "unit"} == set(body["steps"][0])
    assert body["notes"]


@pytest.mark.parametrize("query", ["norms%2Bdropout", "norms+dropout", "norms,dropout", "norms&recompute=dropout"])
def test_rest_takes_several_groups(client: TestClient, query: str) -> None:
    assert client.get(f"/api/v1/exercises/5?recompute={query}").json()["inputs"]["recompute"] == "norms+dropout"


@pytest.mark.parametrize("answer", ["7.37 GB", 7_374_307_332, 7.37e9])
def test_rest_checks_an_answer(client: TestClient, answer: object) -> None:
    body = {"answer": answer, "key": "per_layer_bytes"}
    assert client.post("/api/v1/exercises/1/check", json=body).json()["correct"] is True
    wrong = client.post("/api/v1/exercises/1/check?layers=20", json=body).json()
    assert (wrong["correct"], wrong["key"]) == (False, "per_layer_bytes")


@pytest.mark.parametrize(
    "body", [{}, {"answer": None}, {"answer": [1]}, {"answer": "1", "key": "nope"}, {"answer": "x" * 101}, {"a": 1}, 5]
)
def test_rest_refuses_what_is_no_answer(client: TestClient, body: object) -> None:
    answer = client.post("/api/v1/exercises/1/check", json=body)
    assert answer.status_code == 422
    assert answer.json()["errors"]


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    run = CliRunner().invoke
    shown = run(cli.app, ["exercise", "1", "--layers", "20", "--json"])
    assert '"no_checkpointing_bytes":' in shown.stdout
    assert "Step" not in shown.stdout
    assert "7.37 GB" in run(cli.app, ["exercise", "1"]).stdout
    assert run(cli.app, ["exercise", "1", "--answer", "7.37 GB", "--key", "per_layer_bytes"]).exit_code == 0
    assert run(cli.app, ["exercise", "1", "--answer", "6.87 GB", "--key", "per_layer_bytes"]).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["exercise", "1", "--layers", "none"], "layers"),
        (["exercise", "1", "--layers"], "layers: needs a value"),
        (["exercise", "7"], "one of 1, 2, 3, 4, 5"),
        (["exercise", "1", "layers=3"], "inputs are flags"),
    ],
    ids=["value", "no value", "number", "word"],
)
def test_the_command_line_names_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    monkeypatch.setattr("sys.argv", ["remat", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("formula", "has"),
    [
        ("k* = √(L·b/a)", "<msqrt><mfrac>"),
        ("S^2", "<msup><mi>S</mi><mn>2</mn></msup>"),
        ("A_l", "<msub><mi>A</mi><mi>l</mi></msub>"),
        ("max(m, n)", "<mo>,</mo>"),
        ("<b>", "<mo>&lt;</mo>"),
    ],
)
def test_formulas_are_mathml(formula: str, has: str) -> None:
    assert has in mathml(formula)


@pytest.mark.parametrize("broken", ["", "(", ")", "a/", "√", "^", "a__b", "1,,2", "(((((", "·"])
def test_a_broken_formula_is_still_set(broken: str) -> None:
    assert mathml(broken).startswith("<math")


WALKS = {
    1: ("layers", "20", "per_layer_bytes", "6.87 GB", "7.37 GB"),
    2: ("layers", "36", "exact_k", "8", "2.0"),
    3: ("link_gbs", "32", "serial_seconds", "2.16 s", "4.31 s"),
    4: ("seq", "4096", "ratio", "0.3885", "2.574"),
    5: ("seq", "1024", "overhead_fraction", "6.342", "6.3 %"),
}
"""By exercise: an input and another value for it; an answer's key, a known slip and the right number by default."""


@pytest.mark.slow
@pytest.mark.parametrize("number", WALKS)
def test_an_exercise_worked_through(browser: Browser, shown: tuple[str, dict[str, str]], number: int) -> None:
    name, value, key, slip, right = WALKS[number]
    page = browser.new_page()
    page.goto(f"{shown[0]}/exercises/{number}")
    chart, steps = page.locator("#work figure").first, page.locator(".steps")
    before = chart.inner_html(), steps.inner_text()
    default = page.locator(f"[name={name}]").input_value()

    page.locator(f"[name={name}]").fill(value)
    page.wait_for_url(lambda url: parse_qs(urlsplit(url).query).get(name) == [value])
    expect(steps).not_to_have_text(before[1])
    assert chart.inner_html() != before[0]

    page.locator(f"[name={name}]").fill(default)
    page.wait_for_url(lambda url: parse_qs(urlsplit(url).query).get(name) == [default])
    page.get_by_label("What did you work out?").select_option(key)
    page.get_by_role("textbox", name="Your answer").fill(slip)
    page.get_by_role("button", name="Check").click()
    expect(page.locator("#verdict")).to_have_attribute("data-verdict", "mistake")
    page.get_by_role("textbox", name="Your answer").fill(right)
    page.keyboard.press("Enter")
    expect(page.locator("#verdict")).to_have_attribute("data-verdict", "right")

    page.reload()
    expect(page.locator("#verdict")).to_have_attribute("data-verdict", "right")
    page.close()


@pytest.mark.slow
def test_a_slider_moves_the_chart(browser: Browser, shown: tuple[str, dict[str, str]]) -> None:
    page = browser.new_page()
    page.goto(f"{shown[0]}/exercises/2")
    slider = page.get_by_label("Layers slider")
    slider.focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_label("Layers", exact=False).first).to_have_value("65")
    page.wait_for_url(re.compile("layers=65"))
    expect(page.locator("[data-answer=sqrt_k]")).to_contain_text("8.06")
    page.close()


@pytest.mark.slow
def test_without_scripts_the_form_still_works(browser: Browser, shown: tuple[str, dict[str, str]]) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{shown[0]}/exercises/1")
    page.get_by_label("Layers").fill("20")
    page.get_by_role("button", name="Work it out").click()
    expect(page.locator(".steps")).to_contain_text("20")
    expect(page.locator("#answers")).to_be_visible()
    context.close()


VIEWS = {
    "1440-light": (1440, "light"),
    "390-dark": (390, "dark"),
    "1440-dark": (1440, "dark"),
    "390-light": (390, "light"),
}


def check_page(page: Page, axe: Axe, address: str) -> None:
    """No violation, no refusal of the content policy, nothing wider than the screen; everything folded is opened."""
    seen: list[str] = []
    page.on("console", lambda message: seen.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.goto(address)
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    found = axe.run(page)
    assert found.violations_count == 0, f"{address}: {found.generate_report()}"
    assert [text for text in seen if "status of 4" not in text] == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{address} is wider than the screen"


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_exercises_are_accessible(browser: Browser, shown: tuple[str, dict[str, str]], view: tuple[int, str]) -> None:
    context = browser.new_context(viewport={"width": view[0], "height": 900}, color_scheme=view[1])  # type: ignore[arg-type]
    page, axe = context.new_page(), Axe()
    paths = ["/exercises", *(f"/exercises/{number}" for number in EXERCISES), "/exercises/1?layers=x"]
    for path in [*paths, "/exercises/1?answer=6.87+GB&key=per_layer_bytes", "/exercises/2?solution=hidden"]:
        check_page(page, axe, shown[0] + path)
    context.close()
