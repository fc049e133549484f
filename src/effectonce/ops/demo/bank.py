"""The bank: accounts and a ledger in a SQLite file of its own, apart from the store.

Posting an entry is atomic, but a transfer is two entries, as it is between two banks: a crash can fall between them.
An entry posted under a key is posted once: that is the sink's half of the ``fenced`` guarantee.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, Self

SCHEMA = """
CREATE TABLE accounts (number INTEGER PRIMARY KEY, cents INTEGER NOT NULL);
CREATE TABLE entries (
    id INTEGER PRIMARY KEY, transfer TEXT NOT NULL, account INTEGER NOT NULL, cents INTEGER NOT NULL, key TEXT UNIQUE
);
CREATE TABLE stopped (repeats INTEGER NOT NULL);
INSERT INTO stopped VALUES (0);
"""


class Entry(NamedTuple):
    """A line of the ledger: negative cents leave the account."""

    transfer: str
    account: int
    cents: int


class Bank:
    """The books. Each process opens its own."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, timeout=30.0, isolation_level=None)
        # The demo kills processes, not the machine, so the operating system's cache is safe enough for the bank.
        self._connection.execute("PRAGMA synchronous = NORMAL")

    @classmethod
    def found(cls, path: Path, opening: list[int]) -> None:
        """Make the books of a new bank."""
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(f"BEGIN; {SCHEMA} COMMIT;")
            connection.execute("BEGIN")
            connection.executemany("INSERT INTO accounts VALUES (?, ?)", enumerate(opening))
            connection.execute("COMMIT")

    def post(self, entry: Entry, key: str | None) -> bool:
        """Post an entry to the ledger and its account; False when the key has been used before."""
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        known = key is not None and execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchone()
        if known:
            execute("UPDATE stopped SET repeats = repeats + 1")
        else:
            execute("INSERT INTO entries (transfer, account, cents, key) VALUES (?, ?, ?, ?)", (*entry, key))
            execute("UPDATE accounts SET cents = cents + ? WHERE number = ?", (entry.cents, entry.account))
        execute("COMMIT")
        return not known

    def entries(self) -> list[Entry]:
        """The whole ledger, in order."""
        rows = self._connection.execute("SELECT transfer, account, cents FROM entries ORDER BY id")
        return [Entry(*row) for row in rows]

    def balances(self) -> list[int]:
        """What each account holds."""
        return [cents for (cents,) in self._connection.execute("SELECT cents FROM accounts ORDER BY number")]

    def stopped(self) -> int:
        """How many entries were refused because their key had been used."""
        (repeats,) = self._connection.execute("SELECT repeats FROM stopped").fetchone()
        return int(repeats)

    def close(self) -> None:
        """Close this process's books."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
