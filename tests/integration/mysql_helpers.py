"""What the tests of the MySQL store share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import quote, urlsplit
from uuid import uuid4

import pymysql

from effectonce._records import Claim, Completion, Decision, Record, State, Verdict
from effectonce.keys import new_owner
from effectonce.stores.mysql import MySQLStore

LONG = 3600.0
ASKED = b"asked" * 3


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


class Place:
    """A table of a test's own, and a user of its own whose connections can be counted."""

    def __init__(self, url: str) -> None:
        self.admin_url = url
        self.table = f"it_{uuid4().hex}"
        self.user = f"u{uuid4().hex[:16]}"
        self.password = "p:/?#@ü'%"  # all that a URL or a statement might stumble over
        self.database = urlsplit(url).path[1:]
        with self.session() as session:
            session("SET NAMES utf8mb4")
            session(f"CREATE USER {self.user} IDENTIFIED BY %s", self.password)
            session(f"GRANT SELECT, INSERT, UPDATE, DELETE, CREATE ON {self.database}.* TO {self.user}")

    def url(self, server_url: str = "", **options: object) -> str:
        """The URL of the store, of this server or one that stands before it."""
        parts = urlsplit(server_url or self.admin_url)
        query = "&".join(f"{name}={value}" for name, value in {"table": self.table, **options}.items())
        who = f"{self.user}:{quote(self.password, safe='')}"
        return f"mariadb://{who}@{parts.hostname}:{parts.port}/{self.database}?{query}"

    def store(self, server_url: str = "", **options: object) -> MySQLStore:
        """A handle on the store."""
        url = self.url(server_url, **options)
        return MySQLStore.from_url(
            url, {"table": self.table, **{name: str(v) for name, v in options.items()}}
        )

    def session(self) -> Session:
        """A connection that may do everything."""
        return Session(self.admin_url)

    def connections(self) -> list[int]:
        """The ids of the store's connections."""
        with self.session() as session:
            query = "SELECT id FROM information_schema.processlist WHERE user = %s"
            return [id for (id,) in session(query, self.user)]

    def remove(self) -> None:
        with self.session() as session:
            session(f"DROP TABLE IF EXISTS {self.table}")
            session(f"DROP USER {self.user}")


@contextmanager
def place_on(url: str) -> Iterator[Place]:
    """A table and a user for as long as it is entered."""
    place = Place(url)
    try:
        yield place
    finally:
        place.remove()


def claim_of(key: str = "k", owner: bytes | None = None, **choices: Any) -> Claim:
    """A claim that does not end while a test runs."""
    return Claim(key, owner or new_owner(), choices.pop("fingerprint", ASKED), LONG, LONG, **choices)


def ending_of(decision: Decision, result: bytes | None = b"done", keep: float = LONG) -> Completion:
    """The completion of what was granted."""
    record = granted(decision)
    return Completion(record.key, record.owner, record.fence, State.COMPLETED, result, keep)


def granted(decision: Decision) -> Record:
    """The record of a claim that must have been granted."""
    assert decision.verdict in (Verdict.CLAIMED, Verdict.TAKEN_OVER), decision
    assert decision.record is not None
    return decision.record
