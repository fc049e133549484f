"""Sessions in the SQLite file of a receiver's records: one transaction for each verb, shared by those who wait."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from .._blocking import run
from ..stores import _sqlite_rows, sqlite
from ..stores.base import Features, Store, StoreStats
from ..stores.sqlite import SQLiteStore
from ..transactions._sqlite3 import SQLite3
from ._sql import SqlDesk, Tables, named
from ._store import DeskStore

TABLES = ("effectonce_sessions", "effectonce_requests")


class Work(NamedTuple):
    """A command of the SQLite store: something to do inside a transaction, which may be shared with others."""

    do: Callable[[sqlite3.Connection], Any]


def _perform(store: SQLiteStore, connection: sqlite3.Connection, work: Work, _: float) -> Any:
    if connection.in_transaction:
        return work.do(connection)
    return store._file.in_transaction(connection, work.do)


sqlite.PERFORM[Work] = _perform


class SQLiteSessions(DeskStore):
    """The sessions in a file, for callers of one colour: ``submit`` is the store's, or that of its thread."""

    features = Features()

    def __init__(self, store: SQLiteStore, submit: Callable[..., Any]) -> None:
        self._store, self._submit = store, submit
        self.tables = Tables("sqlite", named("sqlite", *TABLES), store._clock)

    @classmethod
    def beside(cls, store: SQLiteStore) -> SQLiteSessions:
        """The sessions in the same file as a store's records; their tables are made if they are not there."""
        sessions = cls(store, store.submit)

        def create(connection: sqlite3.Connection) -> None:
            for statement in sessions.tables.sql.schema:
                connection.execute(statement)

        store.execute((cast("Any", Work(create)),))
        return sessions

    async def at_desk(self, work: Any) -> Any:
        def do(connection: sqlite3.Connection) -> Any:
            return run(work(SqlDesk(SQLite3(connection), self.tables)))

        return (await self._submit((Work(do),)))[0]

    async def purge(self, limit: int = 256) -> int:
        """Look at ``limit`` sessions and forget those whose lease is over."""
        return cast("int", await self.at_desk(lambda desk: desk.collect(secrets.token_hex(16), limit)))

    async def now(self) -> float:
        """The store's clock."""
        return self._store._clock()

    async def stats(self) -> StoreStats:
        """Count the requests that are remembered."""

        def count(connection: sqlite3.Connection) -> dict[str, int]:
            asked = self.tables.sql.of["census"]
            return {_sqlite_rows.STATES[state].name: number for state, number in connection.execute(asked)}

        (by_state,) = await self._submit((sqlite.Look(count),))
        return StoreStats(keys=sum(by_state.values()), bytes=0, by_state=by_state)

    def for_asyncio(self) -> Store:
        """The same, executed on a thread."""
        other = cast("Any", self._store.for_asyncio())
        return SQLiteSessions(self._store, other.submit)
