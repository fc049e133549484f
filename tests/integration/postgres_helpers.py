"""A table on PostgreSQL, and sessions to look at it with, for the tests of the PostgreSQL store."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Self

import psycopg
import pytest
from psycopg import errors
from tests.integration.sql_places import ASKED, SqlPlace, colours
from tests.servers.fixtures import HasURL

from effectonce.stores._postgres_steps import CLAIMED, id_of
from effectonce.stores.postgres import PostgresStore


class Session:
    """Somebody else's connection."""

    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(url, autocommit=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def __call__(self, statement: str, *values: object) -> list[Any]:
        """Have one statement done."""
        cursor = self.connection.execute(statement.encode(), values or None)
        return cursor.fetchall() if cursor.description else []

    def log_position(self) -> int:
        """How much has been written to the server's log."""
        return int(self("SELECT pg_current_wal_insert_lsn() - '0/0'")[0][0])


def drop(session: Session, table: str) -> None:
    """Drop a table and what belongs to it, whether it rotates or not."""
    session(f"DROP TABLE IF EXISTS {table}, {table}_ring, {table}_sweep")
    for function in ("put", "turn"):
        session(f"DROP FUNCTION IF EXISTS {table}_{function}")


IN_THE_WAY = (errors.LockNotAvailable, errors.SerializationFailure, errors.UniqueViolation)
"""What a step may meet: a lock, or somebody who was first. The next one does better."""


class Ring:
    """The slots of a table that rotates, turned by hand."""

    def __init__(self, session: Session, table: str) -> None:
        self.table, self._session = table, session
        self.turns = 0

    @property
    def slot(self) -> int:
        """The current one."""
        return int(self._session(f"SELECT slot FROM {self.table}_ring")[0][0])

    def rows(self) -> list[int]:
        """How many are in each slot."""
        count = "SELECT count(*) FROM {}_{}"
        return [self._session(count.format(self.table, slot))[0][0] for slot in range(3)]

    def counted(self, what: str) -> int:
        """One of the server's counters, for all slots together. It may be behind for a moment."""
        query = f"SELECT sum({what})::bigint FROM pg_stat_user_tables WHERE relname ~ %s"
        return int(self._session(query, f"^{self.table}_[0-9]$")[0][0] or 0)

    def step(self, period: float = 0.0, pages: int = 1 << 30, few: int = 1 << 30, pause: float = 0) -> bool:
        """What receivers do now and then. Here a period is over at once, and all that lives moves."""
        return bool(self._session(f"SELECT {self.table}_turn({period}, {pages}, {few}, {pause})")[0][0])

    def rest(self) -> None:
        """Let the pause after a lock that was not to be had be over."""
        self._session(f"UPDATE {self.table}_sweep SET rests_until = 0")

    def turn(self, few: int = 1 << 30) -> None:
        """Steps until another slot is current."""
        before = self.slot
        while self.slot == before:
            with suppress(*IN_THE_WAY):
                self.step(few=few)
        self.turns += 1


@contextmanager
def turning(url: str, table: str, least: int = 0) -> Iterator[None]:
    """Turn a ring all the time, and at least so often before this is left."""
    done = threading.Event()

    def turn() -> None:
        with Session(url) as session:
            ring = Ring(session, table)
            while not done.is_set() or ring.turns < least:
                ring.turn()

    with ThreadPoolExecutor(1) as thread:
        turning = thread.submit(turn)
        try:
            yield
        finally:
            done.set()
        turning.result()


class Place(SqlPlace[Session]):
    """A table and a role on PostgreSQL."""

    scheme = "postgresql"
    narrow = {"pool": 4}  # noqa: RUF012

    def session(self) -> Session:
        return Session(self.admin_url)

    def prepare(self) -> None:
        with self.session() as session:
            session(f"CREATE ROLE {self.user} LOGIN PASSWORD 'p:/?#@ü''%'")
            session(f"GRANT CREATE ON SCHEMA public TO {self.user}")

    def remove(self) -> None:
        with self.session() as session:
            session("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", self.user)
            drop(session, self.table)
            session(f"DROP OWNED BY {self.user}")
            session(f"DROP ROLE {self.user}")

    def store(self, server_url: str = "", driver: str = "", **options: object) -> PostgresStore:
        store = super().store(server_url, driver, **options)
        assert isinstance(store, PostgresStore)
        return store

    def connections(self) -> list[int]:
        with self.session() as session:
            query = "SELECT pid FROM pg_stat_activity WHERE usename = %s"
            return [pid for (pid,) in session(query, self.user)]

    def end(self, connections: Sequence[int]) -> None:
        with self.session() as session:
            for pid in connections:
                session("SELECT pg_terminate_backend(%s)", pid)

    def describe(self, text: str) -> None:
        with self.session() as session:
            session(f"COMMENT ON TABLE {self.table} IS '{text}'")

    def lock(self, session: Session, *keys: str) -> None:
        session("BEGIN")
        session(f"SELECT 1 FROM {self.table} WHERE key = ANY (%s) FOR UPDATE", list(keys))

    def hold(self, session: Session, *keys: str) -> None:
        session("BEGIN")
        for key in keys:
            record = (uuid.UUID(bytes=id_of(key)), key, ASKED, CLAIMED, 60.0, 60.0, b"somebody")
            session(f"SELECT {self.table}_put(%s, %s, %s, %s, %s, %s, %s)", *record)

    def is_waiting(self, session: Session) -> bool:
        waiting = "SELECT 1 FROM pg_stat_activity WHERE usename = %s AND wait_event_type = 'Lock'"
        return bool(session(waiting, self.user))


@pytest.fixture
def place(postgres: HasURL) -> Iterator[Place]:
    with Place(postgres.url) as place:
        yield place


colour = colours("blocking", "asyncio", "asyncpg")


@pytest.fixture(params=["psycopg", "asyncpg"])
def driver(request: pytest.FixtureRequest) -> str:
    return "" if request.param == "psycopg" else f"+{request.param}"


FIXTURES = place, colour, driver
"""For a module of tests to take over by name."""
