"""What the tests of the outbox share: databases of every engine, and a broker that lives in the test."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from effectonce.outbox import Event, Outbox, Relay, Unsent
from effectonce.outbox._database import Database, open_database

FIRST_RETRY = 0.01


class World:
    """An outbox of a test's own."""

    def __init__(self, url: str, connect: Callable[[], Any]) -> None:
        self.url, self.connect = url, connect
        self.table = f"ob_{uuid4().hex[:20]}"
        self.outbox = Outbox(self.table)

    @property
    def engine(self) -> str:
        return self.url.partition("://")[0]

    def database(self) -> Database:
        return open_database(self.url, self.table)

    def relay(self, publisher: Any, **options: Any) -> Relay:
        options = {"retry": (FIRST_RETRY, FIRST_RETRY), **options}
        return Relay(self.url, publisher, table=self.table, **options)

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """A connection in a transaction, which is committed in the end."""
        connection = self.connect()
        try:
            yield connection
            connection.commit()
        finally:
            connection.close()

    def add(self, *events: tuple[str, str | None], topic: str = "t") -> None:
        """Commit events, each a payload and a key."""
        with self.transaction() as connection:
            writer = self.outbox.on(connection)
            for payload, key in events:
                writer.add(topic, payload, key=key)

    def do(self, statement: str) -> list[Any]:
        """Have a statement done and committed; {} is the table."""
        with self.transaction() as connection:
            cursor = connection.cursor()
            cursor.execute(statement.format(self.table))
            return list(cursor.fetchall()) if cursor.description else []

    def remove(self) -> None:
        self.do("DROP TABLE IF EXISTS {}")
        if self.engine == "postgresql":
            self.do("DROP SEQUENCE IF EXISTS {}_ears")


class Broker:
    """A publisher that remembers what it got, and fails as it is told."""

    keeps_order = False

    def __init__(self) -> None:
        self.got: list[Event] = []
        self.calls: list[int] = []
        self.refused: set[str] = set()
        """Payloads that are refused, each time."""
        self.is_away = False
        self.before: Callable[[], object] = lambda: None

    def publish(self, events: Sequence[Event]) -> list[Exception | None]:
        self.before()
        self.calls.append(len(events))
        if self.is_away:
            raise ConnectionError("nobody listens")
        return [self._one(event) for event in events]

    def _one(self, event: Event) -> Exception | None:
        if (payload := event.payload.decode(errors="replace")) in self.refused:
            return ValueError(f"{payload} is refused")
        self.got.append(event)
        return None

    @property
    def payloads(self) -> list[str]:
        return [event.payload.decode() for event in self.got]

    def close(self) -> None:
        """Nothing is held."""


def unsent() -> Unsent:
    return Unsent("nobody listens")


def postgres_world(url: str) -> World:
    import psycopg

    return World(url, lambda: psycopg.connect(url))


def mariadb_world(url: str) -> World:
    import pymysql

    parts = urlsplit(url)
    login = {"host": parts.hostname, "port": parts.port, "user": parts.username}
    return World(
        url, lambda: pymysql.connect(**login, password=parts.password or "", database=parts.path[1:])
    )


def sqlite_world(folder: Path) -> World:
    return World(f"sqlite:///{folder / 'app.db'}", lambda: sqlite3.connect(folder / "app.db", timeout=60))
