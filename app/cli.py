"""The command line. Flags of what runs are RunSpec's keys; see docs/cli.md."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from pydantic import ValidationError

from app.cli_exercise import SETTINGS as EXERCISE_SETTINGS
from app.cli_exercise import work_out
from app.cli_jobs import jobs
from app.cli_plan import make_plan
from app.errors import AppError
from app.flags import Command, grid, with_spec_flags
from app.settings import Settings, read_settings
from engine.errors import SpecError
from engine.methods import expand_for
from engine.result import Method, Outcome, RunResult, Timeline
from engine.spec import RunSpec

app = typer.Typer(
    name="remat",
    help="Which mix of checkpointing, recomputation, flash attention, offloading and sharding makes a training run "
    "fit, and what it costs in speed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
runs = typer.Typer(help="Stored results.", no_args_is_help=True)
app.add_typer(runs, name="runs")
app.add_typer(jobs, name="jobs")
app.command("plan")(make_plan)
app.command("exercise", context_settings=EXERCISE_SETTINGS)(work_out)

BAD_INPUT = 2
FAILED = 1

DataDir = Annotated[str | None, typer.Option(metavar="PATH", help="Where the database lives (REMAT_DATA_DIR).")]
AsJson = Annotated[bool, typer.Option("--json", help="One RunResult a line on stdout, and nothing else.")]


def main() -> None:
    """The entry point: a user's error is a line on stderr that names the field, and exit code 2; a failure, 1."""
    try:
        if sys.stdout is None:  # closed by the shell: the next file opened, the database maybe, would take its place
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        try:
            _command()
        finally:
            sys.stdout.flush()  # what cannot be written shows here at the latest
    except OSError as error:
        if error.filename is not None:
            raise
        _no_stdout(error)


def _command() -> None:
    try:
        app()
    except (SpecError, ValidationError) as error:
        from app.api.problems import field_errors

        for fault in field_errors(error):
            _say(f"{fault['field']}: {fault['message']}")
        raise SystemExit(BAD_INPUT) from None
    except AppError as error:
        _say(str(error))
        raise SystemExit(error.exit_code) from None


def _no_stdout(error: OSError) -> NoReturn:
    if sys.stdout is not None:  # the interpreter flushes once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):  # `| head` has read what it wanted
        _say(f"cannot write to stdout: {error.strerror}")
    raise SystemExit(FAILED)


def _say(line: str) -> None:
    """A line on stderr. What a message repeats of the input may not steer the terminal."""
    shown = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
    print("".join(shown), file=sys.stderr)


@app.command()
def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; beyond loopback REMAT_TOKEN is required.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    data_dir: DataDir = None,
    worker: Annotated[bool, typer.Option(help="Keep a worker running beside the server.")] = True,
) -> None:
    """Serve the pages and the REST API, with a worker beside them."""
    from app.server import run

    run(read_settings(host=host, port=port, data_dir=data_dir), worker=worker)


@app.command()
def worker(
    data_dir: DataDir = None,
    lifeline: Annotated[bool, typer.Option("--lifeline", help="Stop when stdin ends.")] = False,
) -> None:
    """Work on queued jobs, without a server."""
    from app.jobs.worker import main as work

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    work(read_settings(data_dir=data_dir), lifeline=lifeline)


@app.command()
@with_spec_flags
def predict(
    flags: dict[str, str],
    method: Annotated[
        Literal["closed-form", "simulated"], typer.Option(help="By formula, or with fake tensors.")
    ] = "closed-form",
    as_json: AsJson = False,
) -> None:
    """What a run would need, without running it. A comma-separated list makes a grid."""
    specs = expand_for(method, *grid(flags))
    if method == "closed-form":
        from engine.closed_form import predict as by_formula

        _show((by_formula(spec) for spec in specs), specs, as_json)
        return
    from app.local import executed

    with _Progress(specs, as_json) as progress:
        answers = executed(specs, method, read_settings(), progress.note)
        _show(progress.each(result for result, _ in answers), specs, as_json)


@app.command()
@with_spec_flags
def measure(
    flags: dict[str, str],
    save: Annotated[bool, typer.Option(help="Record the results in the database.")] = True,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Run real steps and measure them. A comma-separated list makes a grid."""
    from app.local import measured

    specs = expand_for("measured", *grid(flags))
    settings = read_settings(data_dir=data_dir)
    with _Progress(specs, as_json) as progress:
        answers = measured(specs, settings, progress.note)
        results = _recorded(answers, settings) if save else (result for result, _ in answers)
        _show(progress.each(results), specs, as_json)


def _recorded(answers: Iterable[tuple[RunResult, Timeline | None]], settings: Settings) -> Iterator[RunResult]:
    """The results, each stored before it is shown."""
    from app.db import runs as stored
    from app.db.migrate import open_database
    from app.db.models import new_id

    database = open_database(settings.data_dir, settings.busy_seconds)
    for answer, timeline in answers:
        result = answer.model_copy(update={"id": new_id()})
        with database.write() as session:
            stored.add(session, result, timeline)
        yield result
    database.close()


def _show(results: Iterable[RunResult], specs: list[RunSpec], as_json: bool) -> None:
    """Print results as they come (JSON) or together (table); exit 1 if one failed. Out of memory is a result."""
    from app.terminal import json_line, results_table

    shown = []
    for result in islice(results, len(specs)):
        shown.append(result)
        if as_json:
            json_line(result)
    if not as_json:
        results_table(shown)
    failed = [result for result in shown if result.outcome == "failed"]
    for result in failed:
        print(f"{result.spec_hash} failed: {result.error}", file=sys.stderr)
    if failed:
        raise typer.Exit(FAILED)


class _Progress:
    """What is going on, on stderr; silent with --json, so that a program's log stays its own."""

    def __init__(self, specs: Sequence[RunSpec], quiet: bool) -> None:
        from rich.console import Console

        from app.terminal import differing

        self.console = Console(stderr=True, quiet=quiet)
        self.status = self.console.status("starting torch")
        self.specs, self.keys = specs, differing(specs)
        self.done = 0

    def __enter__(self) -> _Progress:
        self.status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.status.stop()

    def note(self, text: str) -> None:
        running = self.specs[min(self.done, len(self.specs) - 1)]
        self.status.update(f"{self._name(self.done + 1, running)}: {text[:100]}")

    def each(self, results: Iterable[RunResult]) -> Iterator[RunResult]:
        for result in results:
            self.done += 1
            self.console.print(f"{self._name(self.done, result.spec)}: {result.outcome}", markup=False, highlight=False)
            yield result

    def _name(self, number: int, spec: RunSpec) -> str:
        """`run 2 of 6 (per-layer, flash)`"""
        from app.terminal import label

        return f"run {number} of {len(self.specs)} ({label(spec, self.keys)})"


@runs.command()
def export(
    output: Annotated[Path, typer.Option(help="File to write; - is stdout.")] = Path("-"),
    format: Annotated[Literal["csv", "parquet", "json"], typer.Option(help="json: one RunResult a line.")] = "csv",
    job_id: Annotated[str | None, typer.Option(help="Only this job's results.")] = None,
    method: Annotated[Method | None, typer.Option(help="Only results of this method.")] = None,
    outcome: Annotated[Outcome | None, typer.Option(help="Only results that ended so.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Write stored results to a file, oldest first."""
    from app.client import check_job_id
    from app.db.migrate import open_database
    from app.db.runs import Filters, every
    from app.exports import encoded
    from app.jobs import queue

    if job_id is not None:
        check_job_id(job_id)
    settings = read_settings(data_dir=data_dir)
    filters = Filters(job_id=_listed(job_id), method=_listed(method), outcome=_listed(outcome))
    database = open_database(settings.data_dir, settings.busy_seconds)
    with database.read() as session:
        if job_id is not None and queue.get(session, job_id) is None:
            raise SpecError("job_id", f"no job {job_id!r} in {settings.data_dir}: see `remat jobs list`")
        chunks = encoded(format, every(session, filters))
        if str(output) == "-":
            sys.stdout.buffer.writelines(chunks)
        else:
            _write(output, chunks)
    database.close()


def _write(path: Path, chunks: Iterable[bytes]) -> None:
    try:
        with path.open("wb") as file:
            file.writelines(chunks)
    except OSError as error:
        raise SpecError("output", f"cannot write {path}: {error.strerror}") from error


def _listed(value: str | None) -> list[str]:
    return [] if value is None else [value]


@app.command()
def doctor(
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure bandwidths known from before again.")] = False,
) -> None:
    """Check this installation: versions, database, disk, torch, device, bandwidths. Exit 1 if something is broken."""
    from rich.console import Console

    from app.doctor import findings

    console = Console(highlight=False, soft_wrap=True)
    colours = {"ok": "green", "warning": "yellow", "error": "red"}
    broken = False
    for finding in findings(read_settings(), refresh=refresh):
        console.print(f"{finding.state:8}", style=colours[finding.state], end="")
        console.print(f"{finding.what:13} {finding.fact}", markup=False)
        broken = broken or finding.state == "error"
    if broken:
        raise typer.Exit(FAILED)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def validate(context: typer.Context) -> None:
    """How accurate Remat is. Takes --only, --configs, --json, --write and --help."""
    import subprocess

    # The torch half of the engine runs as a process of its own, as always.
    command = [sys.executable, "-m", "engine.validate", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


for group in (app, runs, jobs):
    for command in group.registered_commands:
        command.cls = Command


if __name__ == "__main__":
    main()
