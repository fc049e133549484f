"""Atomic mode over the standard library's ``sqlite3.Connection``."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ..errors import UsageError
from .base import Adapter, Dialect, Result, Style, Values, translated

if TYPE_CHECKING:
    from sqlite3 import Connection


class SQLite3(Adapter):
    """A connection of sqlite3. By default it begins a transaction before the first change, and so does this."""

    dialect: Dialect = "sqlite"
    style: ClassVar[Style] = "qmark"
    may_begin = True
    how_to_begin = (
        'connection.execute("BEGIN IMMEDIATE"), or leave isolation_level= of sqlite3.connect() as it is.'
    )

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def in_transaction(self) -> bool:
        connection = self._connection
        return connection.in_transaction or (
            connection.isolation_level is not None and getattr(connection, "autocommit", False) is not True
        )

    def is_idle(self) -> bool:
        return not self._connection.in_transaction

    async def begin(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def check_idle(self) -> None:
        if getattr(self._connection, "autocommit", None) is False:
            raise UsageError(
                "A connection with autocommit=False is in a transaction at all times, so that none can begin with a "
                "call. Call without commit=True and commit yourself, or connect without autocommit=False."
            )
        super().check_idle()

    async def commit(self) -> None:
        self._connection.execute("COMMIT")  # its commit() does nothing where autocommit=True

    async def roll_back(self) -> None:
        self._connection.execute("ROLLBACK")

    async def execute(self, sql: str, values: Values = ()) -> Result:
        connection = self._connection
        if not connection.in_transaction:
            # As the driver does before a change, but not before a SAVEPOINT, whose RELEASE would be a commit then.
            connection.execute(f"BEGIN {connection.isolation_level}")
        cursor = connection.cursor()
        cursor.row_factory = None
        text, args = translated(sql, values, self.style)
        cursor.execute(text, args or ())
        rows = cursor.fetchall()
        return Result(rows, max(cursor.rowcount, 0))

    async def hang_up(self) -> None:
        try:
            if (
                self._connection.in_transaction
            ):  # one that is closed keeps its locks while somebody has a cursor of it
                await self.roll_back()
        finally:
            self._connection.close()
