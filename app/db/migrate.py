"""The schema, brought up to date at start: under a lock, all or nothing, with a backup of what was there."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from app.db.session import Database
from app.errors import DatabaseRefused

HEAD = "0001"  # the newest revision in migrations/versions; named here so that a start needs no alembic
MIGRATIONS = Path(__file__).parent / "migrations"


def open_database(data_dir: Path, busy_seconds: float = 15.0) -> Database:
    """The database of `data_dir`, created or migrated as needed.

    Raises DatabaseRefused if it is newer than this version of Remat, corrupt, or cannot be written.
    """
    path = data_dir / "remat.sqlite"
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(data_dir / "migrate.lock"):
            _bring_up_to_date(path, busy_seconds)
    except OSError as error:
        raise DatabaseRefused(f"{data_dir} cannot be written: {error.strerror}. Set REMAT_DATA_DIR.") from error
    except sqlite3.Error as error:
        raise DatabaseRefused(f"{path} cannot be used: {error}. Restore a backup, or move the file away.") from error
    return Database(path, busy_seconds)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _bring_up_to_date(path: Path, busy_seconds: float) -> None:
    found = current_revision(path, busy_seconds)
    if found == HEAD:
        return
    if found is not None and found not in known_revisions():
        raise DatabaseRefused(f"{path} was made by a newer Remat (schema {found}, this one knows {HEAD}): upgrade.")
    if found is not None:
        back_up(path, f"before-{HEAD}")
    upgrade(path, HEAD)


def current_revision(path: Path, busy_seconds: float = 15.0) -> str | None:
    """The schema's revision, None for a new file. Raises sqlite3.Error for a file that is not a sound, writable one."""
    with closing(sqlite3.connect(path, timeout=busy_seconds, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN IMMEDIATE")  # fails at once on a read-only file
        connection.execute("ROLLBACK")
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
        if not tables:
            return None
        if "alembic_version" not in tables:
            raise DatabaseRefused(f"{path} is not a Remat database: it holds other tables. Set REMAT_DATA_DIR.")
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        return str(row[0]) if row else None


def known_revisions() -> set[str]:
    from alembic.script import ScriptDirectory

    return {script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()}


def back_up(path: Path, label: str) -> Path:
    """A consistent copy beside the database, readable by its owner only."""
    folder = path.parent / "backups"
    folder.mkdir(exist_ok=True, mode=0o700)
    copy = folder / f"{path.stem}-{label}-{datetime.now(UTC):%Y%m%dT%H%M%S%f}.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("VACUUM INTO ?", (str(copy),))
    os.chmod(copy, 0o600)
    return copy


def upgrade(path: Path, revision: str, migrations: Path = MIGRATIONS) -> None:
    """Run the migrations up to `revision` in one transaction."""
    _migrate(path, revision, migrations, down=False)


def downgrade(path: Path, revision: str, migrations: Path = MIGRATIONS) -> None:
    """Undo the migrations down to `revision` in one transaction."""
    _migrate(path, revision, migrations, down=True)


def _migrate(path: Path, revision: str, migrations: Path, *, down: bool) -> None:
    # Alembic takes a third of a second to import, and only a start with an old schema needs it.
    from alembic import command
    from alembic.config import Config

    database = Database(path)
    config = Config(attributes={})
    config.set_main_option("script_location", str(migrations))
    try:
        with database.writer.begin() as connection:
            config.attributes["connection"] = connection
            (command.downgrade if down else command.upgrade)(config, revision)
    finally:
        database.close()
