"""A shop that fulfils orders: reserve the goods, charge the card, ship the parcel. All of it, or none of it.

``python shop.py o-1 umbrella 1250`` fulfils one order. ``effectonce sweep shop:sweeper`` goes on with those whose
process has died.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import outside

from effectonce import Policy, Receiver, current
from effectonce.saga import Compensated, Saga, barrier, pivot, step
from effectonce.sweeper import Sweeper
from effectonce.transactions import retrying

STOCK = 30
"""Of every item, in the beginning."""
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS stock (item TEXT PRIMARY KEY, left INTEGER NOT NULL CHECK (left >= 0));
CREATE TABLE IF NOT EXISTS reservations (order_id TEXT PRIMARY KEY, item TEXT);
CREATE TABLE IF NOT EXISTS mails (key TEXT PRIMARY KEY, order_id TEXT);
INSERT OR IGNORE INTO stock VALUES ('umbrella', {STOCK}), ('lantern', {STOCK}), ('compass', 3);
"""

# The records of sagas and barriers are tables beside the shop's own, so that one transaction can hold both.
receiver = Receiver(
    "sqlite:///shop.db?beside=yes", policy=Policy(lease=os.environ.get("FULFILMENT_LEASE", "10s"))
)


@dataclass
class Order:
    """What a customer wants."""

    id: str
    item: str
    cents: int
    city: str = "Paris"


class OutOfStock(Exception):
    """There is nothing left. Nothing was changed, and asking again won't help."""


@contextmanager
def transaction() -> Iterator[sqlite3.Connection]:
    """A transaction in the shop's own database."""
    with closing(sqlite3.connect("shop.db", timeout=30, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection
        connection.execute("COMMIT")


# Steps


def reserve(order: Order) -> str:
    """Take one from the shelf, in a transaction of the shop's own, behind the barrier."""

    def take(connection: sqlite3.Connection) -> str:
        taken = connection.execute(
            "UPDATE stock SET left = left - 1 WHERE item = ? AND left > 0", (order.item,)
        )
        if taken.rowcount == 0:
            raise OutOfStock(order.item)
        connection.execute("INSERT INTO reservations VALUES (?, ?)", (order.id, order.item))
        return f"one {order.item}"

    return retrying(transaction, lambda on: barrier(receiver.on(on)).act(take, on))


def put_back(order: Order) -> None:
    """Undo ``reserve``. If it never happened, this sees to it that it never will."""

    def put(connection: sqlite3.Connection) -> None:
        connection.execute("UPDATE stock SET left = left + 1 WHERE item = ?", (order.item,))
        connection.execute("DELETE FROM reservations WHERE order_id = ?", (order.id,))

    retrying(transaction, lambda on: barrier(receiver.on(on)).undo(put, on))


def charge(order: Order) -> str:
    """Charge the card. The key is the same however often this runs, so the bank charges once."""
    return outside.charge(current().key_for("bank"), order.id, order.cents)


def refund(order: Order, charge: str | None) -> None:
    """Undo ``charge``; where its answer got lost, ``charge`` is None, and the bank has to know by the order."""
    outside.void(current().key_for("bank"), order.id)


def ship(order: Order, charge: str) -> str:
    """Hand the parcel over. From here on there is no way back."""
    return outside.ship(current().key_for("carrier"), order.id, order.city)


def mail(order: Order, ship: str) -> None:
    """Tell the customer, sooner or later."""
    with transaction() as connection:
        connection.execute("INSERT OR IGNORE INTO mails VALUES (?, ?)", (current().key_for("mail"), order.id))


QUICK = ("50ms", "1s")
fulfil = Saga(
    receiver,
    "fulfil",
    step(reserve, put_back, refused=(OutOfStock,), backoff=QUICK),
    step(charge, refund, refused=(outside.CardDeclined,), backoff=QUICK),
    pivot(ship, refused=(outside.Undeliverable,), backoff=QUICK),
    step(mail, backoff=QUICK),
)
sweeper = Sweeper(receiver, fulfil, every="1s")


def prepare() -> None:
    """Make the tables and fill the shelves, once."""
    with closing(sqlite3.connect("shop.db", timeout=30)) as connection:
        connection.executescript(SCHEMA)


if __name__ == "__main__":
    prepare()
    wanted = Order(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    try:
        print(fulfil.run(wanted.id, wanted))
    except Compensated as compensated:
        print(compensated)
    receiver.close()
