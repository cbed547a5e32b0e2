"""Sessions on SQLite: writers take the write lock at BEGIN, readers never wait for them.

SQLAlchemy's default transactions on SQLite lose updates without an error (docs/decisions/002-sqlite.md), so both
engines switch the driver's own transactions off and say BEGIN themselves.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry

WRITER_PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = NORMAL",
    "foreign_keys = ON",
    "temp_store = MEMORY",
    "journal_size_limit = 67108864",
)


def _engine(path: Path, busy_seconds: float, pragmas: tuple[str, ...], begin: str) -> Engine:
    made = create_engine(f"sqlite:///{path}", connect_args={"timeout": busy_seconds}, pool_size=10, max_overflow=50)

    @event.listens_for(made, "connect")
    def _connected(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        assert isinstance(connection, sqlite3.Connection)
        connection.isolation_level = None
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(made, "begin")
    def _began(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return made


class Database:
    """One SQLite file. `write()` and `read()` are transactions; what is called inside them never commits."""

    def __init__(self, path: Path, busy_seconds: float = 15.0) -> None:
        self.path = path
        self.writer = _engine(path, busy_seconds, WRITER_PRAGMAS, "BEGIN IMMEDIATE")
        self.reader = _engine(path, busy_seconds, ("query_only = ON",), "BEGIN")

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that holds the write lock from its first statement; committed at the end."""
        with Session(self.writer, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A consistent snapshot; writing through it is an error."""
        with Session(self.reader, expire_on_commit=False) as session:
            yield session

    def close(self) -> None:
        self.writer.dispose()
        self.reader.dispose()
