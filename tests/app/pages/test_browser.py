"""The pages in a real browser: accessible, within the content policy, and the whole path from form to curve."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

PAGES = (
    "home",
    "plan", "refused", "new", "jobs", "job", "explore", "runs", "run", "oom", "compare", "about", "accuracy",
    "missing",
)  # fmt: skip
VIEWS = {
    "1440-light": (1440, "light"),
    "390-dark": (390, "dark"),
    "1440-dark": (1440, "dark"),
    "390-light": (390, "light"),
}
CUT_CAPTIONS = """[...document.querySelectorAll(".table caption")].filter(caption =>
  caption.getBoundingClientRect().right > caption.closest(".table").getBoundingClientRect().right + 1
).map(caption => caption.textContent)"""
"""Captions that reach beyond the box in which their table scrolls."""
CHARTS = ("home", "job", "explore", "run", "accuracy")

Shown = tuple[str, dict[str, str]]


@pytest.fixture(params=VIEWS.values(), ids=VIEWS.keys())
def tab(request: pytest.FixtureRequest, browser: Browser) -> Iterator[Page]:
    """A page in one size and colour scheme; whatever it asks of another host is an error."""
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    yield context.new_page()
    context.close()


def watch(page: Page) -> list[str]:
    """What goes wrong from now on: refusals of the content policy, exceptions, requests to other hosts."""
    seen: list[str] = []
    page.on("console", lambda message: seen.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("request", lambda request: seen.append(request.url) if "//127.0.0.1:" not in request.url else None)
    return seen


def faults(seen: list[str]) -> list[str]:
    """Chromium also logs the answers that a test provokes on purpose (404, 422) as errors."""
    return [text for text in seen if "status of 4" not in text and not text.startswith(("data:", "blob:"))]


@pytest.mark.slow
def test_no_page_has_a_violation(tab: Page, shown: Shown) -> None:
    address, pages = shown
    axe = Axe()
    for name in PAGES:
        seen = watch(tab)
        tab.goto(address + pages[name])
        if name in CHARTS:
            expect(tab.locator(".js-plotly-plot .main-svg").first).to_be_attached()
        tab.evaluate("for (const folded of document.querySelectorAll('details')) folded.open = true")
        found = axe.run(tab)
        assert found.violations_count == 0, f"{name}: {found.generate_report()}"
        assert faults(seen) == [], name
        wider = tab.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wider <= 0, f"{name} is {wider} px wider than the screen"
        assert tab.evaluate(CUT_CAPTIONS) == [], name


def test_charts_draw_what_they_are_given(tab: Page, shown: Shown) -> None:
    address, pages = shown
    tab.goto(address + pages["explore"])
    chart = tab.locator("#tradeoff")
    expect(chart.locator(".main-svg").first).to_be_attached()
    types = chart.evaluate("place => place._fullData.map(trace => trace.type)")
    assert set(types) == {"scatter"}
    assert chart.evaluate("place => getComputedStyle(place.querySelector('.modebar')).position") == "absolute"
    assert chart.evaluate("place => place._context.showSendToCloud") is False
    markers = chart.evaluate("place => place._fullData.flatMap(trace => trace.customdata ?? []).length")
    assert markers == 4 * 2 + 0  # four measured runs and their predictions; the sixth failed, the fifth has no peak


def test_every_tick_of_a_logarithmic_axis_is_a_whole_number(tab: Page, shown: Shown) -> None:
    """Not "2" for 20 and for 0.02: each label is the value at its tick."""
    address, pages = shown
    for path, chart in (("/explore?log_x=1&log_y=1", "#tradeoff"), (pages["accuracy"], ".chart >> nth=0")):
        tab.goto(address + path)
        place = tab.locator(chart)
        expect(place.locator(".main-svg").first).to_be_attached()
        for axis in ("xaxis", "yaxis"):
            ticks = place.evaluate(
                f"place => place._fullLayout.{axis}._vals.filter(tick => tick.text && !tick.minor)"
                ".map(tick => [10 ** tick.x, tick.text])"
            )
            assert len(ticks) > 1
            assert [float(text.replace(",", "")) for _, text in ticks] == pytest.approx([at for at, _ in ticks])


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio of two colours as a browser computes them, `rgb(1, 2, 3)`."""

    def luminance(colour: str) -> float:
        parts = [float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_dashes_of_masked_scores_can_be_read(tab: Page, shown: Shown) -> None:
    """An axe run does not judge text of one character."""
    tab.goto(shown[0] + "/learn/flash")
    ink = tab.locator("td.tile-hidden").first.evaluate("cell => getComputedStyle(cell).color")
    paper = tab.locator(".card").first.evaluate("card => getComputedStyle(card).backgroundColor")
    assert contrast(ink, paper) >= 4.5


def test_keyboard_and_theme(browser: Browser, shown: Shown) -> None:
    address, _ = shown
    page = browser.new_page(color_scheme="light")
    page.goto(address)
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(paper) != light
    page.reload()
    assert page.evaluate(paper) != light
    page.close()


def test_the_calculator_answers_as_one_types(browser: Browser, shown: Shown) -> None:
    address, _ = shown
    page = browser.new_page()
    page.goto(address)
    before = page.locator("#answer .bar-table tbody").inner_text()
    page.get_by_label("Sequence length").fill("8192")
    expect(page.locator("#answer .bar-table tbody")).not_to_have_text(before)
    page.wait_for_url(re.compile(r"\?seq=8192$"))
    page.get_by_label("Sequence length").fill("0")
    expect(page.locator("#answer [role=alert]")).to_contain_text("seq")
    page.go_back()
    expect(page.locator("h1")).to_be_visible()
    page.close()


def test_a_point_leads_to_its_run(browser: Browser, shown: Shown) -> None:
    address, pages = shown
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.goto(address + pages["explore"])
    point = page.locator("#tradeoff .scatterlayer .points path").first
    box = point.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(page.locator("#tradeoff .hovertext")).to_be_visible()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_url(re.compile(r"/runs/[0-9a-f]{32}$"))
    page.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The product as a user starts it: `remat serve`, with its worker. The address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "app.cli", "serve", "--port", str(port), "--data-dir", str(tmp_path / "data")]
    environment = {**os.environ, "REMAT_LOCK_DIR": str(tmp_path / "locks"), "OMP_NUM_THREADS": "2"}
    process = subprocess.Popen(command, env=environment, cwd=tmp_path)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(20)


@pytest.mark.slow
def test_from_the_form_to_the_curve(browser: Browser, served: str) -> None:
    page = browser.new_page()
    page.set_default_timeout(20_000)
    seen = watch(page)
    for _ in range(100):
        try:
            page.goto(f"{served}/jobs/new")
            break
        except Exception:
            page.wait_for_timeout(200)
    page.get_by_label("Micro-batch").fill("1")
    page.get_by_label("Sequence length").fill("64")
    page.get_by_label("sqrt").uncheck()
    expect(page.locator("#preview h2")).to_have_text("4 runs")
    page.get_by_role("button", name="Run the benchmark").click()
    page.wait_for_url(re.compile(r"/jobs/[0-9a-f]{32}$"))
    expect(page.locator("#live .tag.succeeded")).to_be_visible(timeout=180_000)  # by events alone: no reload
    expect(page.locator("#live tbody tr")).to_have_count(4)
    expect(page.locator("#job-curve .scatterlayer .points path").first).to_be_visible()
    page.get_by_role("link", name="Explore", exact=True).last.click()
    expect(page.locator("#tradeoff .scatterlayer .points path").first).to_be_visible()
    expect(page.get_by_role("region", name="Runs on the chart").locator("tbody tr")).to_have_count(4)
    assert [text for text in seen if "ERR_CONNECTION_REFUSED" not in text and "//127" not in text] == []
    page.close()
