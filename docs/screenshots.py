"""Pictures of the real product for the README: starts Remat on an empty directory, runs the example through the form,
and photographs what came of it.

    .venv/bin/python docs/screenshots.py            # needs chromium; takes as long as the example, about two minutes
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).parent / "images"
EXAMPLE_SECONDS = 900  # far more than it takes, for a busy machine


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(address: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            urlopen(f"{address}/healthz").close()
            return
        except URLError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def photograph(page: Page, address: str) -> None:
    """Run the example from the empty overview; then one picture a page, the first also in the dark."""
    page.goto(address)
    page.get_by_role("button", name="Run the example").click()
    page.wait_for_url(re.compile(r"/jobs/[0-9a-f]{32}$"))
    page.locator("#live .tag.succeeded").wait_for(timeout=EXAMPLE_SECONDS * 1000)
    job = page.url.rpartition("/")[2]
    run = page.locator("#live tbody th a").first.get_attribute("href")
    for name, path in (("overview", "/"), ("explore", f"/explore?job_id={job}"), ("job", f"/jobs/{job}"), ("run", run)):
        page.goto(f"{address}{path}")
        page.locator(".js-plotly-plot .main-svg").first.wait_for(state="attached")
        page.wait_for_timeout(500)
        page.screenshot(path=IMAGES / f"{name}.png", full_page=name == "overview")
    page.emulate_media(color_scheme="dark")
    page.goto(f"{address}/explore?job_id={job}")
    page.locator(".js-plotly-plot .main-svg").first.wait_for(state="attached")
    page.wait_for_timeout(500)
    page.screenshot(path=IMAGES / "explore-dark.png")


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    port = free_port()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        command = [sys.executable, "-m", "app.cli", "serve", "--port", str(port), "--data-dir", folder]
        server = subprocess.Popen(command, env=os.environ | {"REMAT_LOCK_DIR": f"{folder}/locks"})
        try:
            wait_for(f"http://127.0.0.1:{port}")
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            page = browser.new_page(viewport={"width": 1280, "height": 1000}, color_scheme="light")
            photograph(page, f"http://127.0.0.1:{port}")
            browser.close()
        finally:
            server.terminate()
            server.wait(20)


if __name__ == "__main__":
    main()
