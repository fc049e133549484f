"""The SQLite store keeps the contract."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from effectonce.stores import Store
from effectonce.stores.sqlite import SQLiteStore
from effectonce.testing.clocks import ManualClock
from effectonce.testing.contract import StoreContract


class TestSQLiteStore(StoreContract):
    """Records in a file, by the suite's clock."""

    path: Path

    @pytest.fixture(autouse=True)
    def file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "effects.db"

    def make_store(self, clock: ManualClock) -> Store:
        return SQLiteStore(self.path, clock=clock)

    def reopen(self, clock: ManualClock) -> Store:
        return SQLiteStore(self.path, clock=clock)

    @contextmanager
    def stall(self) -> Iterator[None]:
        """Hold the file's write lock, as another process would."""
        with closing(sqlite3.connect(self.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield
            other.execute("ROLLBACK")
