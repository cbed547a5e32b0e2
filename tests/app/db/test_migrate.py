from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from app.db import migrate
from app.db.migrate import (
    HEAD,
    MIGRATIONS,
    back_up,
    current_revision,
    downgrade,
    known_revisions,
    open_database,
    upgrade,
)
from app.db.models import Base
from app.errors import DatabaseRefused

HALF_FAILING = """
import sqlalchemy as sa
from alembic import op
revision, down_revision, branch_labels, depends_on = "9999", "{head}", None, None
def upgrade():
    op.create_table("half", sa.Column("id", sa.Integer, primary_key=True))
    op.execute("UPDATE jobs SET name = 'changed'")
    op.execute("INSERT INTO no_such_table VALUES (1)")
def downgrade():
    pass
"""


def tables(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as connection:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}


def test_head_is_the_newest_revision() -> None:
    assert max(known_revisions()) == HEAD


def test_migrations_make_what_the_models_say(tmp_path: Path) -> None:
    database = open_database(tmp_path)
    with database.reader.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    database.close()


def test_up_down_up(tmp_path: Path) -> None:
    path = tmp_path / "remat.sqlite"
    upgrade(path, "head")
    downgrade(path, "base")
    assert tables(path) <= {"alembic_version"}
    upgrade(path, "head")
    assert current_revision(path) == HEAD


def test_a_migration_that_fails_half_way_leaves_the_old_schema(tmp_path: Path) -> None:
    migrations = tmp_path / "migrations"
    shutil.copytree(MIGRATIONS, migrations)
    (migrations / "versions" / "9999_half.py").write_text(HALF_FAILING.format(head=HEAD))
    path = tmp_path / "remat.sqlite"
    upgrade(path, HEAD)
    before = tables(path)
    with pytest.raises(Exception, match="no_such_table"):
        upgrade(path, "9999", migrations)
    assert tables(path) == before
    assert current_revision(path) == HEAD


def test_an_older_database_is_backed_up_before_it_is_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_database(tmp_path).close()
    monkeypatch.setattr(migrate, "HEAD", "0002")
    monkeypatch.setattr(migrate, "upgrade", lambda path, revision: None)
    open_database(tmp_path).close()
    (copy,) = (tmp_path / "backups").iterdir()
    assert current_revision(copy) == HEAD
    assert copy.stat().st_mode & 0o077 == 0


def test_a_backup_holds_what_was_committed(tmp_path: Path) -> None:
    open_database(tmp_path).close()
    path = tmp_path / "remat.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("INSERT INTO workers VALUES ('here/1/2', 'here', 1, 2.0, '2026')")
        connection.commit()
    with closing(sqlite3.connect(back_up(path, "test"))) as connection:
        assert connection.execute("SELECT id FROM workers").fetchall() == [("here/1/2",)]


def newer(path: Path) -> None:
    open_database(path.parent).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '8888'")
        connection.commit()


def foreign(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE other (id)")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        pytest.param(newer, "newer Remat", id="newer"),
        pytest.param(lambda path: path.write_bytes(b"not a database" * 500), "not a database", id="corrupt"),
        pytest.param(foreign, "not a Remat database", id="foreign"),
    ],
)
def test_a_database_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, spoil: object, says: str) -> None:
    path = tmp_path / "remat.sqlite"
    assert callable(spoil)
    spoil(path)
    before = path.read_bytes()
    with pytest.raises(DatabaseRefused, match=says) as refused:
        open_database(tmp_path)
    assert "\n" not in str(refused.value)
    assert path.read_bytes() == before


def test_a_directory_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(DatabaseRefused, match="REMAT_DATA_DIR"):
        open_database(Path("/proc/remat"))


@pytest.mark.slow
def test_processes_that_start_together_migrate_once(tmp_path: Path) -> None:
    command = (
        f"from pathlib import Path; from app.db.migrate import open_database; open_database(Path({str(tmp_path)!r}))"
    )
    started = [subprocess.Popen([sys.executable, "-c", command]) for _ in range(4)]
    assert [process.wait() for process in started] == [0] * 4
    assert current_revision(tmp_path / "remat.sqlite") == HEAD
