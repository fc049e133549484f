"""A table on MariaDB, and sessions to look at it with, for the tests of the MySQL store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

import pymysql
import pytest
from tests.integration.sql_places import ASKED, SqlPlace, colours
from tests.servers.fixtures import HasURL

from effectonce.stores._mysql_sql import Language, Server, Talk
from effectonce.stores.mysql import MySQLStore


class Session:
    """Somebody else's connection."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._connection = pymysql.connect(
            host=parts.hostname,
            port=parts.port or 3306,
            user=parts.username,
            password=parts.password or "",
            database=parts.path[1:],
            autocommit=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def __call__(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Have one statement done."""
        with self._connection.cursor() as cursor:
            cursor.execute(statement, values or None)
            return list(cursor.fetchall())

    def status(self, name: str) -> int:
        """One of the server's counters."""
        return int(self("SHOW GLOBAL STATUS LIKE %s", name)[0][1])


class Place(SqlPlace[Session]):
    """A table and a user on MariaDB."""

    scheme = "mariadb"

    def session(self) -> Session:
        return Session(self.admin_url)

    def prepare(self) -> None:
        with self.session() as session:
            session("SET NAMES utf8mb4")
            session(f"CREATE USER {self.user} IDENTIFIED BY %s", self.password)
            session(f"GRANT SELECT, INSERT, UPDATE, DELETE, CREATE ON {self.database}.* TO {self.user}")

    def remove(self) -> None:
        with self.session() as session:
            session(f"DROP TABLE IF EXISTS {self.table}")
            session(f"DROP USER {self.user}")

    def store(self, server_url: str = "", driver: str = "", **options: object) -> MySQLStore:
        store = super().store(server_url, driver, **options)
        assert isinstance(store, MySQLStore)
        return store

    def connections(self) -> list[int]:
        with self.session() as session:
            query = "SELECT id FROM information_schema.processlist WHERE user = %s"
            return [id for (id,) in session(query, self.user)]

    def end(self, connections: Sequence[int]) -> None:
        with self.session() as session:
            for id in connections:
                session(f"KILL {id}")

    def describe(self, text: str) -> None:
        with self.session() as session:
            session(f"ALTER TABLE {self.table} COMMENT = '{text}'")

    def lock(self, session: Session, *keys: str) -> None:
        session("BEGIN")
        places = ", ".join(f"X'{key.encode().hex()}'" for key in keys)
        session(f"SELECT 1 FROM {self.table} WHERE `key` IN ({places}) FOR UPDATE")

    def hold(self, session: Session, *keys: str) -> None:
        session("BEGIN")
        for key in keys:
            session(
                f"INSERT INTO {self.table} (`key`, state, once, attempts, fence, lease_until, expires_at, owner, "
                "fingerprint) VALUES (%s, 1, 0, 1, 5, 9e9, 9e9, 'somebody', %s)",
                key.encode(),
                ASKED,
            )

    def is_waiting(self, session: Session) -> bool:
        """Whatever command it is: what information_schema says of it stays as it was while one looks often."""
        return session.status("Innodb_row_lock_current_waits") > 0


def speak_mysql(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the server for a MySQL. What is said to one, a MariaDB understands too."""
    greet = Language.greet

    def greet_mysql(language: Language, durable: bool) -> Talk[Server]:
        server = yield from greet(language, durable)
        return server._replace(is_mariadb=False)

    monkeypatch.setattr(Language, "greet", greet_mysql)


@pytest.fixture
def place(mariadb: HasURL) -> Iterator[Place]:
    with Place(mariadb.url) as place:
        yield place


colour = colours("blocking", "asyncio")


@pytest.fixture
def driver() -> str:
    return ""  # there is one for each colour


FIXTURES = place, colour, driver
"""For a module of tests to take over by name."""
