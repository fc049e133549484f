"""What the tests of the PostgreSQL store share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import quote, urlsplit
from uuid import uuid4

import psycopg

from effectonce._records import Claim, Completion, Decision, Record, State, Verdict
from effectonce.keys import new_owner
from effectonce.stores import open_store
from effectonce.stores.postgres import PostgresStore

LONG = 3600.0
ASKED = b"asked" * 3


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


class Place:
    """A table of a test's own, and a role of its own whose connections can be counted."""

    def __init__(self, url: str) -> None:
        self.admin_url = url
        self.table = f"it_{uuid4().hex}"
        self.role = f"r{uuid4().hex[:16]}"
        self.password = "p:/?#@ü'%"  # all that a URL or a statement might stumble over
        self.database = urlsplit(url).path[1:]
        with self.session() as session:
            session(f"CREATE ROLE {self.role} LOGIN PASSWORD 'p:/?#@ü''%'")
            session(f"GRANT CREATE ON SCHEMA public TO {self.role}")

    def url(self, server_url: str = "", driver: str = "", **options: object) -> str:
        """The URL of the store, of this server or one that stands before it."""
        parts = urlsplit(server_url or self.admin_url)
        query = "&".join(f"{name}={value}" for name, value in {"table": self.table, **options}.items())
        who = f"{self.role}:{quote(self.password, safe='')}"
        return f"postgresql{driver}://{who}@{parts.hostname}:{parts.port}/{self.database}?{query}"

    def store(self, server_url: str = "", driver: str = "", **options: object) -> PostgresStore:
        """A handle on the store."""
        store = open_store(self.url(server_url, driver, **options))
        assert isinstance(store, PostgresStore)
        return store

    def session(self) -> Session:
        """A connection that may do everything."""
        return Session(self.admin_url)

    def connections(self) -> list[int]:
        """The process ids of the store's connections."""
        with self.session() as session:
            return [
                pid for (pid,) in session("SELECT pid FROM pg_stat_activity WHERE usename = %s", self.role)
            ]

    def remove(self) -> None:
        with self.session() as session:
            session("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", self.role)
            session(f"DROP TABLE IF EXISTS {self.table}")
            session(f"DROP FUNCTION IF EXISTS {self.table}_put")
            session(f"DROP OWNED BY {self.role}")
            session(f"DROP ROLE {self.role}")


@contextmanager
def place_on(url: str) -> Iterator[Place]:
    """A table and a role for as long as it is entered."""
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
