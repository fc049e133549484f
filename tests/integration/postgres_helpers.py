"""A table on PostgreSQL, and sessions to look at it with, for the tests of the PostgreSQL store."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Self

import psycopg
import pytest
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
            session(f"DROP TABLE IF EXISTS {self.table}")
            session(f"DROP FUNCTION IF EXISTS {self.table}_put")
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
