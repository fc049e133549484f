"""The books, in SQLite: this stands for your database, or for your payment provider.

A line has an id that its caller derived from the idempotency key. To book it again changes nothing, so that an attempt
that takes over from a killed one can't do harm. This is what makes "once" hold through ``kill -9``.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from decimal import Decimal


@dataclass(frozen=True)
class Entry:
    """A line of the books. What was taken back is less than nothing."""

    id: str
    merchant: str
    amount: Decimal
    reference: str


class Ledger:
    """All lines. Each use opens the file, so that threads and processes share it."""

    def __init__(self, path: str) -> None:
        self._path = path
        with self._file() as file:
            file.execute(
                "CREATE TABLE IF NOT EXISTS lines (id TEXT PRIMARY KEY, merchant TEXT, cents INTEGER, reference TEXT)"
            )

    def book(self, entry: Entry) -> None:
        """Write a line, unless it is there."""
        cents = int(entry.amount.scaleb(2))
        with self._file() as file:
            file.execute(
                "INSERT INTO lines VALUES (?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
                (entry.id, entry.merchant, cents, entry.reference),
            )

    def get(self, id: str) -> Entry:
        """One line; LookupError if there is none."""
        with self._file() as file:
            row = file.execute("SELECT * FROM lines WHERE id = ?", (id,)).fetchone()
        if row is None:
            raise LookupError(f"There is no line {id}.")
        return _entry(*row)

    def of(self, merchant: str) -> list[Entry]:
        """The lines of a merchant, oldest first."""
        with self._file() as file:
            rows = file.execute("SELECT * FROM lines WHERE merchant = ? ORDER BY rowid", (merchant,))
            return [_entry(*row) for row in rows]

    @contextmanager
    def _file(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=20)) as file, file:
            yield file


def _entry(id: str, merchant: str, cents: int, reference: str) -> Entry:
    return Entry(id, merchant, Decimal(cents).scaleb(-2), reference)
