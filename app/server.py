"""The web process: uvicorn, told to end open event streams when it is asked to stop."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sqlite3
import threading
from types import FrameType

import uvicorn

from app.db.migrate import open_database
from app.errors import AddressRefused
from app.main import create_app
from app.settings import Settings

SHUTDOWN_SECONDS = 5


class Server(uvicorn.Server):
    """An open stream would keep uvicorn waiting for ever: the streams watch this event."""

    def __init__(self, config: uvicorn.Config, stopping: threading.Event) -> None:
        super().__init__(config)
        self.stopping = stopping

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.stopping.set()
        super().handle_exit(sig, frame)


def run(settings: Settings, *, worker: bool) -> None:
    """Serve until SIGTERM or SIGINT. Raises AddressRefused or DatabaseRefused before anything is started."""
    _try_to_listen(settings.host, settings.port)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger(__name__).info("database %s, SQLite %s", settings.database_path, sqlite3.sqlite_version)
    open_database(settings.data_dir, settings.busy_seconds).close()
    stopping = threading.Event()
    application = create_app(settings, supervise_worker=worker, stopping=stopping)
    config = uvicorn.Config(
        application,
        host=settings.host,
        port=settings.port,
        root_path=settings.root_path,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        log_config=None,
        access_log=False,
        server_header=False,
    )
    Server(config, stopping).run()


def _try_to_listen(host: str, port: int) -> None:
    """uvicorn binds only after the application, and with it the worker, is up: too late for a plain message."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    nowhere = AddressRefused(f"{host} is no address this machine can listen on. Choose another --host.")
    try:
        socket.getaddrinfo(host.strip("[]"), port, family)
    except (socket.gaierror, UnicodeError):  # UnicodeError: a part of the name is longer than DNS has it
        raise nowhere from None
    try:
        socket.create_server((host.strip("[]"), port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise nowhere from None
        reason = os.strerror(error.errno or 0)
        raise AddressRefused(f"cannot listen on {host}, port {port}: {reason}. Choose another --port.") from None
