"""The command line: `remat serve | worker | predict | measure | jobs | runs | doctor`. Flags are RunSpec's keys."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from app.errors import AppError
from app.settings import Settings
from engine.errors import SpecError

app = typer.Typer(
    name="remat",
    help="Which mix of checkpointing, recomputation, flash attention, offloading and sharding makes a training run "
    "fit, and what it costs in speed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

BAD_INPUT = 2
FAILED = 1


def main() -> None:
    """The entry point: errors of the user are one line on stderr and exit code 2, of the machine exit code 1."""
    try:
        app()
    except (SpecError, ValidationError) as error:
        for line in _lines(error):
            print(line, file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    except AppError as error:
        print(error, file=sys.stderr)
        raise SystemExit(FAILED) from None


def _lines(error: SpecError | ValidationError) -> list[str]:
    from app.api.problems import field_errors

    return [f"{fault['field']}: {fault['message']}" for fault in field_errors(error)]


def settings(**chosen: Any) -> Settings:
    """From the environment, with what the command line names put over it."""
    return Settings(**{key: value for key, value in chosen.items() if value is not None})


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; beyond loopback with REMAT_TOKEN.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the database lives.")] = None,
    worker: Annotated[bool, typer.Option(help="Keep a worker running beside the server.")] = True,
) -> None:
    """Serve the pages and the REST API, with a worker beside them."""
    from app.server import run

    run(settings(host=host, port=port, data_dir=data_dir), worker=worker)


@app.command()
def worker(
    data_dir: Annotated[Path | None, typer.Option(help="Where the database lives.")] = None,
    lifeline: Annotated[bool, typer.Option(help="Stop when stdin ends.")] = False,
) -> None:
    """Work on queued jobs, without a server."""
    from app.jobs.worker import main as work

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    work(settings(data_dir=data_dir), lifeline=lifeline)


if __name__ == "__main__":
    main()
