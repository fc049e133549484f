"""Atomic mode over asyncmy's ``Connection``."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

from .base import Adapter, Dialect, Result, Style, Values, plain, translated


class Asyncmy(Adapter):
    """A connection of an event loop to MySQL or MariaDB. Unless it has autocommit, it always is in a transaction."""

    dialect: Dialect = "mysql"
    awaits = True
    style: ClassVar[Style] = "format"
    may_begin = True
    how_to_begin = "await connection.begin(), or connect without autocommit=True."

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._plain = import_module("asyncmy.cursors").Cursor
        self.is_mariadb = "mariadb" in connection.get_server_info().lower()

    def in_transaction(self) -> bool:
        return not (self._connection.get_autocommit() and self.is_idle())

    def is_idle(self) -> bool:
        return not self._connection.get_transaction_status()

    def is_closed(self) -> bool:
        return not self._connection.connected

    async def begin(self) -> None:
        await self._connection.begin()

    async def commit(self) -> None:
        await self._connection.commit()

    async def roll_back(self) -> None:
        await self._connection.rollback()

    async def execute(self, sql: str, values: Values = ()) -> Result:
        text, args = translated(sql, values, self.style)
        async with self._connection.cursor(self._plain) as cursor:
            await cursor.execute(text, args)
            return Result(plain(await cursor.fetchall()), max(cursor.rowcount, 0))

    async def hang_up(self) -> None:
        self._connection.close()
