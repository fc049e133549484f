"""Victims in the middle of their transactions: transfers of money in atomic mode, killed where an order says.

Points are the boundaries of statements, those of effectonce, of the handler and COMMIT alike: before each is sent, and
after it is answered. Run by ``test_atomic``.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from typing import Any

import psycopg
import pymysql
from tests.crash.victims import Order, Tick, fork_victims
from tests.integration.transaction_drivers import Place

from effectonce import Message, Policy, Receiver

AMOUNT = 7
START = 1000


class Declined(Exception):
    """An error that is a result: there is no money."""


def connect(place: Place, tick: Tick | None = None) -> Any:
    """A connection whose statements are counted, if somebody counts."""
    connection: Any
    if place.dialect == "sqlite":
        connection = sqlite3.connect(place.path, timeout=30, check_same_thread=False)
    elif place.dialect == "postgresql":
        connection = psycopg.connect(place.url)
    else:
        connection = pymysql.connect(**place.mysql())
    return counted(connection, tick) if tick else connection


def counted(connection: Any, tick: Tick) -> Any:
    """The connection, with somebody who counts its statements."""
    if isinstance(connection, sqlite3.Connection):
        connection.set_trace_callback(tick)
        connection.execute("PRAGMA cache_size")
    elif isinstance(connection, psycopg.Connection):
        connection.wait = around(connection.wait, tick)  # type: ignore[method-assign]
    else:
        for name in ("query", "_send_autocommit_mode", "commit"):
            setattr(connection, name, around(getattr(connection, name), tick))
    return connection


def around(function: Callable[..., Any], tick: Tick) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        tick()
        result = function(*args, **kwargs)
        tick()
        return result

    return wrapped


class Bank:
    """Accounts and transfers over one connection, and a receiver for what is asked of them."""

    connection: Any

    def __init__(self, place: Place, fault: str = "") -> None:
        self.place, self.fault = place, fault
        self.receiver = Receiver(place.store_url, policy=Policy(remember=(Declined,), lease="1h"))

    def execute(self, sql: str) -> Any:
        cursor = self.connection.cursor()
        cursor.execute(sql)
        return cursor

    def transfer(self, message: Message) -> dict[str, Any]:
        """Move money from one account of a pair to the other."""
        pair = message.id.split("-")[0]
        self.execute(f"INSERT INTO transfers_{self.place.name} VALUES ('{message.id}')")
        accounts = f"accounts_{self.place.name}"
        self.execute(f"UPDATE {accounts} SET balance = balance - {AMOUNT} WHERE id = '{pair}-from'")
        self.execute(f"UPDATE {accounts} SET balance = balance + {AMOUNT} WHERE id = '{pair}-to'")
        if "declined" in message.id:
            raise Declined(message.id)
        return {"transferred": message.id}

    def answer(self, id: str) -> str:
        """What a caller is told of one transfer."""
        handler = self.transfer
        if self.fault == "the effect first" and "declined" not in id:
            done = self.transfer(Message(id=id))
            self.connection.commit()
            handler = lambda message: done  # noqa: E731
        try:
            outcome = self.receiver.on(self.connection).process(Message(id=id), handler)
        except Declined:
            return "declined"
        return str(outcome.value["transferred"])

    def process(self, id: str) -> str:
        """One transfer in a transaction of its own."""
        answer = self.answer(id)
        self.connection.commit()
        return answer

    def process_alone(self, id: str) -> str:
        """One transfer, whose transaction begins with its claim and is committed with its result."""
        policy = (
            None if "declined" in id else Policy(lease="1h")
        )  # with a mark before the handler, and without
        try:
            on = self.receiver.on(self.connection, commit=True)
            return str(on.process(Message(id=id), self.transfer, policy=policy).value["transferred"])
        except Declined:
            return "declined"

    def process_all(self, ids: list[str]) -> list[str]:
        """Several in one transaction."""
        outcomes = self.receiver.on(self.connection).process_batch(
            [Message(id=id) for id in ids], self.transfer
        )
        self.connection.commit()
        return [
            "declined" if outcome.error else outcome.value["transferred"]  # type: ignore[index]
            for outcome in outcomes
        ]


def prepare(place: Place) -> None:
    """The tables of accounts and transfers."""
    place.ask(
        f"CREATE TABLE accounts_{place.name} (id VARCHAR(40) PRIMARY KEY, balance INTEGER NOT NULL)",
        f"CREATE TABLE transfers_{place.name} (id VARCHAR(40) NOT NULL)",
    )


def open_accounts(place: Place, pairs: list[str]) -> None:
    """Two accounts for every victim."""
    rows = ", ".join(f"('{pair}-from', {START}), ('{pair}-to', {START})" for pair in pairs)
    place.ask(f"INSERT INTO accounts_{place.name} VALUES {rows}")


SINGLE, DECLINED, BATCH = "{}-single", "{}-declined", ("{}-b1", "{}-declined2", "{}-b2")
ALONE = ("{}-alone", "{}-declined3")


def ids_of(pair: str) -> list[str]:
    """All transfers of one victim."""
    return [each.format(pair) for each in (SINGLE, DECLINED, *ALONE, *BATCH)]


def live(order: Order, tick: Tick) -> None:
    """A transfer, its repeat, one that is declined, both as transactions of their own, and a batch; every answer is
    noted when it is given.
    """
    bank = Bank(Place(*order["place"]), order["fault"])
    bank.connection = connect(bank.place, tick)
    pair, journal = order["pair"], os.open(order["journal"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(id: str, answer: str) -> None:
        os.write(journal, f"{id} {answer}\n".encode())

    for id in (SINGLE, SINGLE, DECLINED):
        note(id.format(pair), bank.process(id.format(pair)))
    for id in ALONE:
        note(id.format(pair), bank.process_alone(id.format(pair)))
    batch = [id.format(pair) for id in BATCH]
    for id, answer in zip(batch, bank.process_all(batch), strict=True):
        note(id, answer)


def main() -> None:
    """Carry out orders until there are none."""
    fork_victims(live)
