"""Shipping: a service of its own, with a database of its own, that hears of orders and sends each of them once.

The record of an event, the shipment and the stock are one transaction. An event that comes twice, or to two processes
at once, or again after a crash, is one shipment.

    python shipping.py                          consumes
"""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager

import events

from effectonce import Message, Receiver
from effectonce.messaging import redis_streams
from effectonce.transactions import retrying

STOCK = {"chair": 100_000, "table": 100_000, "lamp": 100_000}

receiver = Receiver("sqlite:///shipping.db?beside=yes", consumer="shipping")


@contextmanager
def transaction() -> Iterator[sqlite3.Connection]:
    """One that is committed when it is left."""
    with closing(sqlite3.connect("shipping.db", timeout=30)) as connection, connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection


def ship(message: Message, connection: sqlite3.Connection) -> str:
    """Runs once for each event."""
    order = message.payload
    row = (order["order"], message.id, order["item"], order["quantity"])
    connection.execute("INSERT INTO shipments VALUES (?, ?, ?, ?)", row)
    connection.execute("UPDATE stock SET left = left - ? WHERE item = ?", (order["quantity"], order["item"]))
    return f"shipped order {order['order']}"


def receive(message: Message) -> str:
    """One event, in a transaction of its own."""

    def body(connection: sqlite3.Connection) -> str:
        return receiver.on(connection).process(message, lambda message: ship(message, connection)).value

    return retrying(transaction, body)


def consume() -> None:
    """Until SIGTERM."""
    if not events.IS_REDIS:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        for message in events.follow():
            receive(message)
        return
    consumer = redis_streams.Consumer(
        events.client(),
        events.STREAM,
        group="shipping",
        receiver=receiver,
        transaction=transaction,
        idle="2s",  # how long the events of a dead consumer wait for another
    )
    signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
    consumer.run(ship)


def prepare() -> None:
    """The tables, unless they are there."""
    receiver.get("nothing")  # its first command makes its table
    with transaction() as connection:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS shipments (number INTEGER, event TEXT, item TEXT, quantity INTEGER)"
        )
        connection.execute("CREATE TABLE IF NOT EXISTS stock (item TEXT PRIMARY KEY, left INTEGER)")
        connection.executemany("INSERT OR IGNORE INTO stock VALUES (?, ?)", STOCK.items())


if __name__ == "__main__":
    prepare()
    consume()
