"""`remat jobs …`: a server's queue, through its REST API."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import typer

from app.api.schemas import Status
from app.client import Client
from app.flags import grid, with_spec_flags
from app.settings import read_settings

jobs = typer.Typer(help="Jobs of a running server.", no_args_is_help=True)

Url = Annotated[str | None, typer.Option(help="The server; by default the one of REMAT_HOST and REMAT_PORT.")]
JobId = Annotated[str, typer.Argument(help="A job's id.")]
FAILED = 1


def client(url: str | None) -> Client:
    settings = read_settings()
    token = settings.token.get_secret_value() if settings.token else None
    return Client(url or f"http://{settings.host}:{settings.port}{settings.root_path}", token)


@jobs.command("submit")
@with_spec_flags
def submit(
    flags: dict[str, str],
    method: Annotated[Literal["measured", "simulated", "closed-form"], typer.Option(help="How.")] = "measured",
    name: Annotated[str | None, typer.Option(help="A name to find it by.")] = None,
    priority: Annotated[int, typer.Option(help="Higher runs first.")] = 0,
    key: Annotated[str | None, typer.Option(help="Idempotency-Key: the same key is the same job.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end; exit 1 unless it succeeded.")] = False,
    url: Url = None,
) -> None:
    """Queue a job; prints it as JSON. A comma-separated list makes a grid."""
    spec, vary = grid(flags)
    server = client(url)
    job = server.submit(spec, vary, key=key, method=method, name=name, priority=priority)
    if wait:
        server.wait(job["id"])
        job = server.job(job["id"])
    _print(job)
    if wait and job["status"] != "succeeded":
        raise typer.Exit(FAILED)


@jobs.command("list")
def list_jobs(
    status: Annotated[Status | None, typer.Option(help="Only this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="One job a line.")] = False,
    url: Url = None,
) -> None:
    """Jobs, newest first."""
    from app.terminal import jobs_table

    found = client(url).jobs(status, limit)
    if as_json:
        for job in found:
            _print(job)
    else:
        jobs_table(found)


@jobs.command("show")
def show(job_id: JobId, url: Url = None) -> None:
    """One job as JSON."""
    _print(client(url).job(job_id))


@jobs.command("log")
def log(job_id: JobId, url: Url = None) -> None:
    """A job's log."""
    server, after = client(url), 0
    while True:
        page = server.log(job_id, after)
        for line in page["lines"]:
            print(line["at"][:19], line["message"])
        if page["next_after"] == after:
            return
        after = page["next_after"]


@jobs.command("cancel")
def cancel(job_id: JobId, url: Url = None) -> None:
    """Stop a job."""
    _print(client(url).cancel(job_id))


@jobs.command("retry")
def retry(job_id: JobId, url: Url = None) -> None:
    """Go on with a failed, cancelled or timed-out job where it stopped."""
    _print(client(url).retry(job_id))


def _print(value: dict[str, Any]) -> None:
    print(json.dumps(value))
