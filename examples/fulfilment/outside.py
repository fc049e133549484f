"""The outside world: a bank and a carrier, as other companies run them. Each keeps its own book, in a file here.

Both do what good providers do: a call with a key that they know is answered as the first one was. And both have a bad
day now and then: they do as they are told, but their answer gets lost.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager

SCHEMA = """
CREATE TABLE IF NOT EXISTS lines (key TEXT PRIMARY KEY, what TEXT, order_id TEXT, cents INTEGER);
CREATE TABLE IF NOT EXISTS voided (order_id TEXT PRIMARY KEY);
"""
LOST = 0.1
"""How many answers get lost."""


class CardDeclined(Exception):
    """The bank says no. Nothing was booked, and asking again won't help."""


class Undeliverable(Exception):
    """The carrier says no. Nothing was fetched, and asking again won't help."""


@contextmanager
def book() -> Iterator[sqlite3.Connection]:
    """A transaction in the providers' book; perhaps its answer gets lost."""
    with closing(sqlite3.connect("outside.db", timeout=30, isolation_level=None)) as connection:
        connection.executescript(SCHEMA)
        connection.execute("BEGIN IMMEDIATE")
        yield connection
        connection.execute("COMMIT")
    if random.random() < LOST:
        raise TimeoutError("no answer")


def charge(key: str, order_id: str, cents: int) -> str:
    """The bank takes money, once for each key, unless the order was voided."""
    if cents > 10_000:
        raise CardDeclined("over the limit")
    with book() as connection:
        if connection.execute("SELECT 1 FROM voided WHERE order_id = ?", (order_id,)).fetchone():
            raise CardDeclined("voided")
        _enter(connection, key, "charge", order_id, cents)
    return f"charge {key[-8:]}"


def void(key: str, order_id: str) -> None:
    """The bank gives back what was taken for an order, and takes no more for it: its own kind of barrier."""
    with book() as connection:
        connection.execute("INSERT OR IGNORE INTO voided VALUES (?)", (order_id,))
        taken = connection.execute(
            "SELECT cents FROM lines WHERE order_id = ? AND what = 'charge'", (order_id,)
        ).fetchone()
        if taken is not None:
            _enter(connection, key, "refund", order_id, -taken[0])


def ship(key: str, order_id: str, city: str) -> str:
    """The carrier fetches a parcel, once for each key."""
    if city == "Atlantis":
        raise Undeliverable(city)
    with book() as connection:
        _enter(connection, key, "parcel", order_id, 0)
    return f"parcel {key[-8:]}"


def _enter(connection: sqlite3.Connection, key: str, what: str, order_id: str, cents: int) -> None:
    connection.execute("INSERT OR IGNORE INTO lines VALUES (?, ?, ?, ?)", (key, what, order_id, cents))
