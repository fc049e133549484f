"""Atomic mode over PyMySQL's ``Connection``."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

from .base import Adapter, Dialect, Result, Style, Values, plain, translated

IN_TRANSACTION = 1
"""The bit of the server's status that says so."""


class PyMySQL(Adapter):
    """A blocking connection to MySQL or MariaDB. Unless it has autocommit, it always is in a transaction."""

    dialect: Dialect = "mysql"
    style: ClassVar[Style] = "format"
    may_begin = True
    how_to_begin = "connection.begin(), or connect without autocommit=True."

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._plain = import_module("pymysql.cursors").Cursor
        self.is_mariadb = "mariadb" in connection.get_server_info().lower()

    def in_transaction(self) -> bool:
        return not (self._connection.get_autocommit() and self.is_idle())

    def is_idle(self) -> bool:
        return not self._connection.server_status & IN_TRANSACTION

    def is_closed(self) -> bool:
        return not self._connection.open

    async def begin(self) -> None:
        self._connection.begin()

    async def commit(self) -> None:
        self._connection.commit()

    async def roll_back(self) -> None:
        self._connection.rollback()

    async def execute(self, sql: str, values: Values = ()) -> Result:
        text, args = translated(sql, values, self.style)
        with self._connection.cursor(self._plain) as cursor:
            cursor.execute(text, args)
            return Result(plain(cursor.fetchall()), max(cursor.rowcount, 0))

    async def hang_up(self) -> None:
        self._connection._force_close()  # saying goodbye may fail, or wait
