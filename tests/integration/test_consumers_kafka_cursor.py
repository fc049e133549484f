"""Cursor mode on a real Kafka, with a million records: what is stored is as large after the last as after the first.

The effect does not grow either, so that all of a database can be measured. A ledger has some rows, each record moves
one of them by one place, and only from the place before it: one that came twice, too late or too early would find no
such row, and fail.
"""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from tests.integration.consumers_helpers import stop_when
from tests.integration.test_consumers_kafka import PARTITIONS, Topic

from effectonce import Message, Receiver
from effectonce.messaging import cursors, kafka
from effectonce.testing.clocks import wait_until

SIZES = pytest.mark.parametrize("messages", [6_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
BATCH = 1000
ROWS = 333 * PARTITIONS
FIRST = 1 << 40
"""Numbers of records begin so high that none of them takes more room than another."""


class Ledger(Protocol):
    """A database with cursors in it, and with rows that records move."""

    def begin(self) -> Any:
        """Begin a transaction."""
        ...

    def move(self, number: int, connection: Any) -> int:
        """Put a record's number where the one before it is; how many rows were changed by that."""
        ...

    def ask(self, sql: str) -> list[tuple[Any, ...]]: ...

    def size(self) -> int:
        """The bytes of all that could grow."""
        ...


PREPARE = [
    "CREATE TABLE ledger (place INTEGER PRIMARY KEY, last BIGINT NOT NULL)",
    *(f"INSERT INTO ledger VALUES ({place}, {FIRST + place - ROWS})" for place in range(ROWS)),
]
MOVE = "UPDATE ledger SET last = %s WHERE place = %s AND last = %s"


class InFile:
    """A file of SQLite: all of it is measured."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "shop.db"
        with self.begin() as connection:
            for statement in (*cursors.schema("sqlite"), *PREPARE):
                connection.execute(statement)

    @contextmanager
    def begin(self) -> Iterator[sqlite3.Connection]:
        with (
            closing(sqlite3.connect(self._path, timeout=60, check_same_thread=False)) as connection,
            connection,
        ):
            connection.execute("PRAGMA synchronous = OFF")  # nobody pulls the plug here
            connection.execute("BEGIN IMMEDIATE")
            yield connection

    def move(self, number: int, connection: sqlite3.Connection) -> int:
        place = (number - FIRST) % ROWS
        return connection.execute(MOVE.replace("%s", "?"), (number, place, number - ROWS)).rowcount

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self._path, timeout=60)) as connection:
            return connection.execute(sql).fetchall()

    def size(self) -> int:
        return self._path.stat().st_size


class OnServer:
    """A schema of PostgreSQL: the cursors' table is measured, with its index."""

    def __init__(self, url: str) -> None:
        self._url, self._name = url, f"ledger_{uuid4().hex[:12]}"
        with self.begin() as connection:
            for statement in (f"CREATE SCHEMA {self._name}", *cursors.schema("postgresql"), *PREPARE):
                connection.execute(statement)

    def remove(self) -> None:
        with self.begin() as connection:
            connection.execute(f"DROP SCHEMA {self._name} CASCADE")

    def begin(self) -> Any:
        import psycopg

        return psycopg.connect(self._url, options=f"-csearch_path={self._name}")

    def move(self, number: int, connection: Any) -> int:
        place = (number - FIRST) % ROWS
        return int(connection.execute(MOVE, (number, place, number - ROWS)).rowcount)

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        with self.begin() as connection:
            return list(connection.execute(sql).fetchall())

    def size(self) -> int:
        # Without the maps that a vacuum makes, whenever it first comes by.
        parts = ("effectonce_cursors", "effectonce_cursors_pkey")
        return sum(int(self.ask(f"SELECT pg_relation_size('{each}')")[0][0]) for each in parts)


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    """A ledger on each engine in turn."""
    if request.param == "sqlite":
        yield InFile(tmp_path)
        return
    ledger = OnServer(request.getfixturevalue("postgres").url)
    yield ledger
    ledger.remove()


def fill(topic: Topic, numbers: range) -> None:
    """Produce records, in order and many at a time."""
    servers = topic.servers
    producer = Producer(  # idempotent, or what is sent again would come out of order
        {"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 20, "log_level": 0}
    )
    for number in numbers:
        while True:
            try:
                producer.produce(topic.name, str(FIRST + number).encode(), partition=number % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(60) == 0
    producer.close()


@SIZES
def test_the_state_does_not_grow_with_the_messages(messages: int, topic: Topic, ledger: Ledger) -> None:
    """Each record once and in order, through a restart and a rebalance, and a row for each partition."""
    handled: Counter[str] = Counter()
    deadline = time.monotonic() + 100 + messages / 500

    def has_moved(count: int) -> Callable[[], bool]:
        """Whether so many records are in the ledger."""
        begun = sum(range(FIRST - ROWS, FIRST))
        return lambda: int(ledger.ask("SELECT sum(last) FROM ledger")[0][0]) - begun >= count * ROWS

    def consumer(name: str, until: int) -> kafka.Consumer:
        found = kafka.Consumer(
            topic.configuration,
            topic.name,
            receiver=receiver,
            transaction=ledger.begin,
            cursor=True,
            batch=BATCH,
            concurrency=1,
        )

        @found.handler
        def handle(message: Message, connection: Any) -> None:
            assert ledger.move(message.payload, connection) == 1, "not the one that comes next"
            handled[name] += 1

        stop_when(found, has_moved(until), deadline)
        return found

    fill(topic, range(messages // 2))
    with Receiver("memory://") as receiver, ThreadPoolExecutor() as threads:
        consumer("first", until=messages // 4).run()
        sizes = [ledger.size()]
        running = []
        for name in ("second", "third"):  # the third one joins while the second is at work
            other = consumer(name, until=messages)
            running.append(threads.submit(other.run))
            wait_until(lambda: other._broker.is_let_in, seconds=60)  # noqa: B023
        fill(topic, range(messages // 2, messages))
        for each in running:
            each.result()
        sizes.append(ledger.size())
    assert ledger.ask("SELECT place, last FROM ledger ORDER BY place") == [
        (place, FIRST + range(place, messages, ROWS)[-1]) for place in range(ROWS)
    ]
    rows = ledger.ask("SELECT source, low, above FROM effectonce_cursors ORDER BY source")
    ends = [len(range(partition, messages, PARTITIONS)) for partition in range(PARTITIONS)]
    assert rows == [(f"{topic.name}/{number}", end, "") for number, end in enumerate(ends)]
    assert min(ledger.ask("SELECT fence FROM effectonce_cursors")) >= (3,), "a restart and a rebalance"
    assert all(handled[name] for name in ("first", "second", "third"))
    assert topic.letters() == []
    assert sizes[0] == sizes[1]
