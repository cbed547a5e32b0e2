"""What is not documented does not exist: every setting, route and flag stands in docs/."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer

from app.cli import app
from app.cli_exercise import flags as exercise_flags
from app.main import create_app
from app.settings import Settings
from engine.exercises import EXERCISES
from engine.validate.report import TITLES

DOCS = Path(__file__).parents[2] / "docs"
CLI = (DOCS / "cli.md").read_text()
README = (DOCS.parent / "README.md").read_text()
API = (DOCS / "api.md").read_text()


def flags(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        yield from (name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("--"))
    for nested in getattr(command, "commands", {}).values():
        yield from flags(nested)


@pytest.mark.parametrize("name", [f"REMAT_{name.upper()}" for name in Settings.model_fields])
def test_every_setting(name: str) -> None:
    assert f"`{name}`" in CLI


@pytest.mark.parametrize("flag", sorted(set(flags(typer.main.get_command(app))) - {"--help"}))
def test_every_flag(flag: str) -> None:
    assert f"`{flag}`" in CLI


@pytest.mark.parametrize("path", create_app(Settings(data_dir=Path("/nonexistent"))).openapi()["paths"])
def test_every_route(path: str) -> None:
    assert f" {path}`" in API


def test_what_the_readme_tells_to_run_can_be_run() -> None:
    commands = [line for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines()]
    assert "REMAT_PORT=" in README
    assert all("REMAT_TOKEN=" in line for line in commands if "docker compose" in line)
    files = [word for line in commands for word in line.split() if word.endswith(".json")]
    assert files
    assert all((DOCS.parent / name).is_file() for name in files)
    number, *words = next(line for line in commands if "remat exercise" in line).split()[2:]
    inputs = EXERCISES[int(number)].inputs
    assert dict(exercise_flags(words)).items().isdisjoint({each.name: str(each.default) for each in inputs}.items())


@pytest.mark.parametrize("section", TITLES)
def test_every_section_of_the_validation(section: str) -> None:
    row = next(line for line in CLI.splitlines() if line.startswith("| `validate` |"))
    assert f"`{section}`" in row
