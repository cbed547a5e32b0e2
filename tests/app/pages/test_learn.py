"""The Learn pages, their players in a real browser, and the map of the course."""

import re
from html import unescape
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect
from starlette.testclient import TestClient

from app.pages.learn import TOPICS
from app.pages.learn_figures import MEMORY_INPUTS, memory, reconciled, replayed
from app.pages.mathml import mathml
from engine.closed_form import predict
from engine.exercises import EXERCISES, solve
from engine.spec import RunSpec
from engine.units import GB, format_bytes, format_seconds

MAP = Path(__file__).parents[3] / "docs" / "course-map.md"
SERVER = "http://127.0.0.1:8000/"
VIEWS = {
    "1440-light": (1440, "light"),
    "390-dark": (390, "dark"),
    "1440-dark": (1440, "dark"),
    "390-light": (390, "light"),
}

Shown = tuple[str, dict[str, str]]


def links() -> list[str]:
    return re.findall(r"\]\(([^)]*)\)", MAP.read_text())


def test_the_map_has_every_item_of_the_course() -> None:
    course, exercises = MAP.read_text().split("## Exercises")
    assert re.findall(r"^\| (\d+) \|.*\]\(http", course, re.MULTILINE) == [str(row) for row in range(1, 22)]
    assert re.findall(r"^\| (\d+) \|.*\]\(http", exercises, re.MULTILINE) == [str(row) for row in range(1, 6)]


@pytest.mark.parametrize("link", sorted(set(links())))
def test_a_link_of_the_map_resolves(client: TestClient, link: str) -> None:
    assert link.startswith(SERVER)  # a path alone leads nowhere where the map is read
    path, _, place = link.removeprefix(SERVER.rstrip("/")).partition("#")
    answer = client.get(path)
    assert answer.status_code == 200
    assert f'id="{place}"' in answer.text or not place


@pytest.mark.parametrize("slug", TOPICS)
def test_a_page_and_its_fragment(client: TestClient, slug: str) -> None:
    whole = client.get(f"/learn/{slug}").text
    assert TOPICS[slug].title in whole
    fragment = client.get(f"/learn/{slug}", headers={"HX-Request": "true"}).text
    assert fragment.strip().startswith('<div class="stack" id="work">')


@pytest.mark.parametrize("slug", TOPICS)
@pytest.mark.parametrize("text", ["nan", "0", "x", "<script>", "9" * 300], ids=repr)
def test_nonsense_is_a_message(client: TestClient, slug: str, text: str) -> None:
    for each in TOPICS[slug].inputs:
        answer = client.get(f"/learn/{slug}", params={each.name: text})
        assert answer.status_code in (200, 422)
        assert "<script>" not in answer.text
    assert client.get(f"/learn/{slug}?nothing=1").status_code == 422


@pytest.mark.parametrize("slug", TOPICS)
def test_every_bound_gives_a_page_or_a_message(client: TestClient, slug: str) -> None:
    for each in TOPICS[slug].inputs:
        values = each.choices or (f"{each.minimum:g}", f"{each.maximum:.0f}")
        for value in (values[0], values[-1]):
            answer = client.get(f"/learn/{slug}", params={each.name: value})
            assert answer.status_code in (200, 422), f"{each.name}={value}"
            assert not re.search(r"\b(nan|inf|NaN)\b|(?<!ZeRO-)Infinity", answer.text)


@pytest.mark.parametrize(
    "path", [*(f"/learn/{slug}" for slug in TOPICS), *(f"/exercises/{number}" for number in EXERCISES)]
)
def test_who_speaks_of_the_notes_says_which(client: TestClient, path: str) -> None:
    text = client.get(path).text
    assert ("notes" in text.split("<main", 1)[1].lower()) == ('href="/learn#notes"' in text)
    assert 'id="notes"' in client.get("/learn").text


@pytest.mark.parametrize("ratio", [1.0, 16.0])
def test_the_formula_of_the_square_root_is_what_its_page_shows(client: TestClient, ratio: float) -> None:
    layers = 16
    peaks = {}
    for policy, k in {"per-layer": 1, "every-2": 2, "sqrt": 4}.items():
        peaks[k] = replayed({"layers": layers, "checkpointing": policy, "ratio": ratio, "frame": 1})["peak"]
        assert peaks[k] == (layers / k - 1) + k * ratio
    assert min(peaks, key=lambda k: peaks[k]) == {1.0: 4, 16.0: 1}[ratio]
    nested = replayed({"layers": layers, "checkpointing": "nested", "ratio": ratio, "frame": 1})
    assert nested["peak"] <= min(peaks.values())
    assert nested["recomputed"] > layers
    text = client.get("/learn/sqrt").text
    assert mathml("peak(k) = (L/k - 1)·b + k·a") in text
    assert re.search(r'class="axis-name"[^>]*>Layer inputs alive<', text)
    assert "a/b <span" not in text  # a label and its symbol are two things


def test_the_notes_total_is_the_chart_with_the_scores_kept(client: TestClient) -> None:
    """As the table's caption says."""
    assert "attention=standard" in client.get("/learn/memory").text
    asked = {each.name: each.default for each in MEMORY_INPUTS} | {"attention": "standard"}
    total = next(figure for figure in reconciled() if figure.what.startswith("everything for a 7B"))
    shown = next(bar for bar in memory(asked)["policies"].bars if bar.label == "none")
    assert shown.total == format_bytes(total.ours * GB)


def test_an_offloaded_step_waits_for_the_cpu_too(client: TestClient) -> None:
    text = client.get("/learn/offload").text
    assert text.count("waiting for the link and the CPU") == 2
    assert "exposed transfer" not in text
    spec = solve(3, {}).spec
    exposed = predict(RunSpec.model_validate(spec)).timing.phases_seconds.exposed_transfer
    assert f"is predicted to wait {format_seconds(exposed)} beyond" in client.get("/exercises/3").text


def test_the_ladder_and_its_recommendation_have_the_same_units(client: TestClient) -> None:
    text = client.get("/learn/decision").text
    found = [
        unescape(words)
        for words in re.findall(r"<p(?: class=\"small\")?>([^<].*?)</p>", text.split('id="work"')[1], re.S)
    ]
    told = [words for words in found if "at the peak" in words or words.startswith("Predicted peak")]
    assert len(told) > 3
    assert all(" a step, <strong>" in words and "tokens/s a GPU" in words for words in told)
    assert not re.search(r"\ba (A|H|L|RTX|MI)\d", text)


def test_there_is_no_other_page(client: TestClient) -> None:
    assert client.get("/learn/nothing").status_code == 404


def test_a_moment_of_the_replay_has_an_address(client: TestClient) -> None:
    page = client.get("/learn/sqrt?layers=9&checkpointing=sqrt&frame=12").text
    assert "12 of 27: recompute layer 9, 50 inputs&#39; worth alive" in page


@pytest.mark.slow
def test_the_replay_steps_plays_and_pauses(browser: Browser, shown: Shown) -> None:
    page = browser.new_page()
    page.goto(f"{shown[0]}/learn/sqrt")
    moment = page.locator(".moment")
    expect(moment).to_contain_text("1 of 27")
    page.get_by_role("button", name="Next").click()
    expect(moment).to_contain_text("2 of 27")
    expect(page.locator(".block[data-working]")).to_have_attribute("data-block", "1")
    page.keyboard.press("ArrowLeft")
    expect(moment).to_contain_text("1 of 27")
    page.get_by_role("button", name="Play").click()
    expect(moment).to_contain_text("3 of 27", timeout=10_000)
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("slider", name="Moment").fill("11")
    expect(moment).to_contain_text("12 of 27: recompute layer 9, 50 inputs")
    assert page.locator(".block[data-inside]").count() == 3
    page.get_by_label("Policy").select_option("per-layer")
    expect(page.locator(".facts")).to_contain_text("24of 144 with nothing checkpointed")
    page.get_by_role("button", name="Next").click()
    expect(moment).to_contain_text("2 of 27: forward of layer 2")
    page.close()


@pytest.mark.slow
def test_reduced_motion_steps_but_does_not_play(browser: Browser, shown: Shown) -> None:
    context = browser.new_context(reduced_motion="reduce")
    page = context.new_page()
    page.goto(f"{shown[0]}/learn/flash")
    expect(page.get_by_role("button", name="Play")).to_be_hidden()
    page.get_by_role("button", name="Next").click()
    expect(page.locator(".moment")).to_contain_text("2 of 6: queries 4 to 6 meet keys 1 to 3")
    expect(page.locator("[data-tile]:visible")).to_have_count(1)
    context.close()


@pytest.mark.slow
def test_without_scripts_the_moments_are_links(browser: Browser, shown: Shown) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{shown[0]}/learn/flash")
    page.get_by_role("link", name="Next").click()
    expect(page.locator(".moment")).to_contain_text("2 of 6")
    expect(page.locator("[data-tile]:visible")).to_have_count(1)
    context.close()


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_learn_is_accessible(browser: Browser, shown: Shown, view: tuple[int, str]) -> None:
    context = browser.new_context(viewport={"width": view[0], "height": 900}, color_scheme=view[1])  # type: ignore[arg-type]
    page, axe = context.new_page(), Axe()
    for path in ["/learn", *(f"/learn/{slug}" for slug in TOPICS)]:
        seen: list[str] = []
        page.on("console", lambda message, seen=seen: seen.append(message.text) if message.type == "error" else None)
        page.goto(shown[0] + path)
        page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        found = axe.run(page)
        assert found.violations_count == 0, f"{path}: {found.generate_report()}"
        assert seen == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} is wider than the screen"
    context.close()
