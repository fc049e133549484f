"""Atomic mode over Django's database connections, inside ``transaction.atomic``."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

from ..errors import UsageError
from .base import GONE_OR_RAISED, Adapter, Dialect, Result, SavepointGone, Style, Values, plain, translated

VENDORS: dict[str, Dialect] = {"sqlite": "sqlite", "postgresql": "postgresql", "mysql": "mysql"}


class Django(Adapter):
    """``django.db.connection`` or ``connections[…]``. Savepoints are Django's own, with all that it does at them."""

    style: ClassVar[Style] = "format"
    how_to_begin = "with transaction.atomic(): …"

    def __init__(self, connection: Any) -> None:
        vendor = connection.vendor
        if vendor not in VENDORS:
            raise UsageError(f"Django's {vendor} is no engine that effectonce has a table for.")
        self.dialect = VENDORS[vendor]
        self.is_mariadb = vendor == "mysql" and connection.mysql_is_mariadb
        self._connection = connection
        self._blocks: dict[str, Any] = {}

    def in_transaction(self) -> bool:
        return self._connection.in_atomic_block or not self._connection.get_autocommit()

    async def execute(self, sql: str, values: Values = ()) -> Result:
        text, args = translated(sql, values, self.style)
        with self._connection.cursor() as cursor:
            cursor.execute(text, args)
            rows = plain(cursor.fetchall()) if cursor.description else []
            return Result(rows, max(cursor.rowcount, 0))

    async def savepoint(self, name: str) -> None:
        block = import_module("django.db.transaction").Atomic(
            self._connection.alias, savepoint=True, durable=False
        )
        block.__enter__()
        self._blocks[name] = block

    async def release(self, name: str) -> None:
        with GONE_OR_RAISED:
            self._block(name).__exit__(None, None, None)

    async def roll_back_to(self, name: str) -> None:
        # What Django looks at is that there is an error, not which.
        undone = UsageError("The handler failed.")
        with GONE_OR_RAISED:
            self._block(name).__exit__(UsageError, undone, None)

    def _block(self, name: str) -> Any:
        """The block of a savepoint. It ends whatever becomes of it: Django tries to undo what it can't release."""
        block = self._blocks.pop(name, None)
        if block is None:
            raise SavepointGone("its block has been left")
        return block

    async def let_go(self, name: str) -> None:
        if name in self._blocks:
            await self.roll_back_to(name)

    async def hang_up(self) -> None:
        self._connection.close()
