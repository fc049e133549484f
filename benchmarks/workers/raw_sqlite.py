"""The raw limit of SQLite: one table, held connections, synchronous=FULL, nothing between the caller and the SQL."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from time import time

from benchmarks.workers.base import ENCODED, Counter, Setup

LEASE_SECONDS, KEEP_SECONDS = 120.0, 86_400.0


class RawSqlite:
    """Two transactions per new key, one SELECT per duplicate, on a connection held by each thread."""

    TABLE = """CREATE TABLE IF NOT EXISTS records (
        key TEXT PRIMARY KEY, state INTEGER, owner BLOB, expires REAL, result TEXT) WITHOUT ROWID"""
    INDEX = "CREATE INDEX IF NOT EXISTS expiry ON records (expires)"
    CLAIM = "INSERT INTO records VALUES (?, 0, ?, ?, NULL)"
    COMPLETE = (
        "UPDATE records SET state = 1, owner = NULL, expires = ?, result = ? "
        "WHERE key = ? AND state = 0 AND owner = ?"
    )
    READ = "SELECT state, expires, result FROM records WHERE key = ?"

    def __init__(self, setup: Setup, counter: Counter) -> None:
        self._file, self._counter, self._local = setup.file(), counter, threading.local()
        connection = self._connection()
        connection.execute(self.TABLE)
        if setup.variant == "indexed":
            connection.execute(self.INDEX)

    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = sqlite3.connect(self._file, isolation_level=None, timeout=60)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            self._local.connection = connection
        return connection

    def run(self, keys: Iterable[str]) -> None:
        """New keys: claim, commit, handle, complete, commit."""
        execute, handle, bits = self._connection().execute, self._counter.handle, random.randbytes
        for key in keys:
            owner = bits(16)
            execute("BEGIN IMMEDIATE")
            execute(self.CLAIM, (key, owner, time() + LEASE_SECONDS))
            execute("COMMIT")
            handle(key)
            execute("BEGIN IMMEDIATE")
            execute(self.COMPLETE, (time() + KEEP_SECONDS, ENCODED, key, owner))
            execute("COMMIT")

    def replay(self, keys: Iterable[str]) -> None:
        """Duplicates: one SELECT by primary key."""
        execute = self._connection().execute
        for key in keys:
            execute(self.READ, (key,)).fetchone()

    def fill(self, keys: Sequence[str]) -> None:
        """Put the same rows as `run` does, two transactions for all of them."""
        connection = self._connection()
        owners = [random.randbytes(16) for _ in keys]
        for sql, rows in (
            (self.CLAIM, [(key, owner, time()) for key, owner in zip(keys, owners, strict=True)]),
            (
                self.COMPLETE,
                [
                    (time() + KEEP_SECONDS, ENCODED, key, owner)
                    for key, owner in zip(keys, owners, strict=True)
                ],
            ),
        ):
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(sql, rows)
            connection.execute("COMMIT")

    def close(self) -> None:
        """Close this thread's connection; the pooled threads' ones went with their threads."""
        self._connection().close()
