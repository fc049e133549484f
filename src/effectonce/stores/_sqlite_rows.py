"""Records and rows of the SQLite store. What is empty in a record is NULL in a row, which takes no room."""

from __future__ import annotations

import sqlite3
from typing import Any

from .._records import NOBODY, Record, State, make
from ..errors import StoreMismatch
from ._sqlite_file import SQL
from .base import StoreStats

STATES = {int(state): state for state in State}
Pen = sqlite3.Connection | sqlite3.Cursor
"""What executes statements. A connection makes a cursor for each; one that is kept saves that."""
READ, REPLACE = SQL["read"], SQL["replace"]


def read(pen: Pen, key: str) -> Record | None:
    """The record of a key."""
    row = pen.execute(READ, (key,)).fetchone()
    return None if row is None else from_row(key, row)


def from_row(key: str, row: tuple[Any, ...]) -> Record:
    """The record that a row holds."""
    state, owner, fence, fingerprint, lease, attempts, result, expires_at, once = row
    known = STATES.get(state) or _unknown(state)
    fields = (
        key, known, owner or NOBODY, fence, fingerprint or b"", lease or 0.0, attempts, result, expires_at, once == 1,
    )  # fmt: skip
    return make(Record, fields)


def _unknown(state: int) -> State:
    if state == State.ABSENT:  # the one state that is false
        return State.ABSENT
    raise StoreMismatch(
        f"A record is in state {state}, which this effectonce does not know. Use a newer one."
    )


def outline(
    key: str, state: int, fence: int, lease_until: float | None, attempts: int, expires_at: float, once: int
) -> Record:
    """A record without what a purge need not know."""
    return from_row(key, (state, None, fence, None, lease_until, attempts, None, expires_at, once))


def row_of(record: Record) -> tuple[Any, ...]:
    """The row that holds a record."""
    key, state, owner, fence, fingerprint, lease_until, attempts, result, expires_at, once = record
    return (
        key, state, owner or None, fence, fingerprint or None, lease_until or None, attempts, result, expires_at, once,
    )  # fmt: skip


def replaced(pen: Pen, before: Record, after: Record) -> bool:
    """Write a record over another, if that is still the one that was read; whether it was."""
    same = (before.fence, before.state, before.owner or None, before.lease_until or None)
    return pen.execute(REPLACE, (*row_of(after), *same)).rowcount == 1


def scan(connection: sqlite3.Connection, state: State | None, after: str, limit: int) -> list[Record]:
    """Records in key order."""
    if state is None:
        rows = connection.execute(SQL["scan"], (after, limit))
    elif state is State.IN_DOUBT:
        rows = connection.execute(SQL["scan_in_doubt"], (after, limit))
    else:
        rows = connection.execute(SQL["scan_state"], (state, after, limit))
    return [from_row(row[0], row[1:]) for row in rows]


def stats(connection: sqlite3.Connection, now: float) -> StoreStats:
    """Count what is there."""
    census = connection.execute(SQL["census"], (now,)).fetchall()
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    (page_size,) = connection.execute("PRAGMA page_size").fetchone()
    leases = [lease - now for state, _, _, lease in census if state == State.PENDING and lease is not None]
    return StoreStats(
        keys=sum(count for _, count, _, _ in census),
        bytes=pages * page_size,
        by_state={(STATES.get(state) or _unknown(state)).name: count for state, count, _, _ in census},
        oldest_pending_lease=min(leases, default=None),
        expired=sum(expired for _, _, expired, _ in census),
    )
