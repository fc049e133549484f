"""One row of work in the user's own transaction: alone, with a claim and a result by hand, and in atomic mode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, LiteralString

import psycopg

from benchmarks.workers.base import ENCODED, RESULT, Counter, Run, Setup
from effectonce import Message, Receiver

WORK: LiteralString = "CREATE TABLE IF NOT EXISTS work (id text, cents integer)"
DO: LiteralString = "INSERT INTO work VALUES (%s, 1999)"
KEYS: LiteralString = "CREATE TABLE IF NOT EXISTS keys (key text PRIMARY KEY, result text)"
CLAIM: LiteralString = "INSERT INTO keys VALUES (%s) ON CONFLICT DO NOTHING"
COMPLETE: LiteralString = "UPDATE keys SET result = %s WHERE key = %s"


def _connected(setup: Setup) -> psycopg.Connection[Any]:
    connection = psycopg.connect(setup.url, autocommit=True)
    connection.execute(WORK)
    connection.execute(KEYS)
    return connection


def alone(setup: Setup, counter: Counter) -> Run:
    """BEGIN, work, COMMIT: what is unprotected."""
    connection = _connected(setup)

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            with connection.transaction():
                connection.execute(DO, (key,))
            counter.tick()

    return run


def by_hand(setup: Setup, counter: Counter) -> Run:
    """BEGIN, claim, work, complete, COMMIT: five round trips."""
    connection = _connected(setup)

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            with connection.transaction():
                if connection.execute(CLAIM, (key,)).rowcount:
                    connection.execute(DO, (key,))
                    connection.execute(COMPLETE, (ENCODED, key))
            counter.tick()

    return run


def atomic(setup: Setup, receiver: Receiver, counter: Counter) -> Run:
    """The same through ``receiver.on(connection)``, in a block of the user's or as a transaction of its own."""
    connection = _connected(setup)
    receiver.get("nothing")  # makes the table

    def work(message: Message) -> dict[str, Any]:
        connection.execute(DO, (message.id,))
        counter.tick()
        return RESULT

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            with connection.transaction():
                receiver.on(connection).process(Message(id=key), work)

    def run_alone(keys: Iterable[str]) -> None:
        for key in keys:
            receiver.on(connection, commit=True).process(Message(id=key), work)

    return run_alone if setup.variant == "atomic, commit" else run
