"""Adding events, in the transaction of the change they tell of: both are committed, or neither is.

``Outbox.on`` takes a connection that the application already has. It never commits, rolls back or opens another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import _blocking
from ..errors import ColourMismatch, StoreMismatch
from ..transactions import Adapter, adapt
from ..transactions.base import is_missing_table
from ._events import row_of
from ._table import DEFAULT, checked, named


class Outbox:
    """A table of events to be published. ``effectonce migrate --outbox URL`` makes it."""

    def __init__(self, table: str = DEFAULT) -> None:
        self.table = checked(table)

    def on(self, connection: Any) -> Writer:
        """The outbox in your transaction: of sqlite3, psycopg, PyMySQL, asyncpg, asyncmy, SQLAlchemy or Django."""
        return Writer(adapt(connection), self.table)


class Writer:
    """Adds events in one transaction."""

    def __init__(self, adapter: Adapter, table: str) -> None:
        self._adapter, self._table = adapter, table
        self._statement = named(adapter.dialect, table)["add"]

    def add(
        self,
        topic: str,
        payload: object,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        id: str | None = None,
    ) -> str:
        """Add an event, and give its id.

        topic    where to publish it: a stream, an exchange's routing key, a subject, a queue
        payload  bytes, text, or what JSON can express
        key      the aggregate it is about; events of one key are published in the order they were added
        id       inside a handler by default one that a re-run makes again, elsewhere a random one. An id that the
                 outbox already holds is the same event: it is not added twice
        """
        if self._adapter.awaits:
            raise ColourMismatch("This connection is awaited: write `await outbox.on(connection).aadd(…)`.")
        return _blocking.run(self._add(topic, payload, key, headers, id))

    async def aadd(
        self,
        topic: str,
        payload: object,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        id: str | None = None,
    ) -> str:
        """The same, for connections that are awaited."""
        if not self._adapter.awaits:
            raise ColourMismatch("This connection blocks: write `outbox.on(connection).add(…)`.")
        return await self._add(topic, payload, key, headers, id)

    async def _add(
        self, topic: str, payload: object, key: str | None, headers: Mapping[str, str] | None, id: str | None
    ) -> str:
        self._adapter.check()
        row = row_of(topic, payload, key, headers, id)
        try:
            await self._adapter.execute(self._statement, row)
        except Exception as error:
            if is_missing_table(error):
                raise StoreMismatch(
                    f"There is no outbox {self._table} in this database, so the event was not added. Run "
                    "`effectonce migrate --outbox URL` first."
                ) from error
            raise
        return row[0]
