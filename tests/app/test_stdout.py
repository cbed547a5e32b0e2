"""A command whose output cannot be written says so in one line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from app.settings import Settings

FULL = "cannot write to stdout: No space left on device\n"
CLOSED = "cannot write to stdout: Bad file descriptor\n"


@pytest.mark.parametrize(
    ("words", "redirection", "says"),
    [
        pytest.param("runs export", ">/dev/full", FULL, id="csv"),
        pytest.param("runs export --format parquet", ">/dev/full", FULL, id="parquet"),
        pytest.param("predict --json", ">/dev/full", FULL, id="a line"),
        pytest.param("predict", ">/dev/full", FULL, id="a table"),
        pytest.param("--help", ">/dev/full", FULL, id="help"),
        pytest.param("runs export", ">&-", CLOSED, id="closed"),
        pytest.param("predict", ">&-", CLOSED, id="a closed table"),
        pytest.param("runs export", "| true", "", id="nobody reads"),
    ],
)
def test_what_stdout_cannot_take_is_one_line(settings: Settings, words: str, redirection: str, says: str) -> None:
    remat = f"set -o pipefail; {sys.executable} -m app.cli {words} {redirection}"
    environment = {**os.environ, **settings.environment()}
    ended = subprocess.run(["bash", "-c", remat], capture_output=True, text=True, env=environment, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", says)
