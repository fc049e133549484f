"""Migration of the SQLite store's schema, shown on a step that does not exist yet."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from tests.integration.sqlite_helpers import files_in

from effectonce import Message, Receiver
from effectonce.errors import StoreError
from effectonce.ops.cli import main
from effectonce.stores import _sqlite_file
from effectonce.stores.sqlite import SQLiteStore


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A store of today with one finished key."""
    path = tmp_path / "effects.db"
    with Receiver(SQLiteStore(path)) as receiver:
        receiver.process(Message("m-1"), lambda _: "first")
    return path


def step_to_2(monkeypatch: pytest.MonkeyPatch, statement: str) -> None:
    monkeypatch.setattr(_sqlite_file, "SCHEMA", 2)
    monkeypatch.setitem(_sqlite_file.SQL, "migrate_1", statement)


def schema_of(path: Path) -> tuple[int, list[str]]:
    connection = sqlite3.connect(path)
    (version,) = connection.execute("SELECT value FROM effectonce_meta WHERE name = 'schema'").fetchone()
    columns = [row[1] for row in connection.execute("PRAGMA table_info(effectonce_records)")]
    connection.close()
    return version, columns


def test_an_older_schema_is_brought_up_to_date_and_keeps_its_records(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening an older file runs the missing steps once; what it remembers is still replayed."""
    step_to_2(monkeypatch, "ALTER TABLE effectonce_records ADD COLUMN note TEXT")
    for _ in range(2):
        with Receiver(SQLiteStore(old)) as receiver:
            assert receiver.process(Message("m-1"), lambda _: "second").value == "first"
    version, columns = schema_of(old)
    assert version == 2
    assert columns.count("note") == 1


def test_a_migration_that_fails_changes_nothing(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that breaks is rolled back whole, and the error is one of the tree."""
    before = schema_of(old)
    step_to_2(
        monkeypatch, "ALTER TABLE effectonce_records ADD COLUMN note TEXT; ALTER TABLE nowhere ADD COLUMN x"
    )
    with pytest.raises(StoreError):
        SQLiteStore(old)
    assert schema_of(old) == before


def test_migrate_makes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A deployment may call it whatever its store is; what it can't do it says before it makes a file."""
    url = f"sqlite:///{tmp_path}/effects.db"
    assert main(["migrate", "--print", url]) == 2
    assert files_in(tmp_path) == []
    assert [main(["migrate", url]) for _ in range(2)] == [0, 0]
    assert "is ready" in capsys.readouterr().out


@pytest.mark.parametrize("url", ["memory://", "redis://127.0.0.1:1/0"])
def test_migrate_has_nothing_to_do_for_some_stores(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Which is no reason for a deployment to stop."""
    assert main(["migrate", url]) == 0
    assert "nothing to migrate" in capsys.readouterr().out
