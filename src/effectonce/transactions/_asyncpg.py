"""Atomic mode over asyncpg's ``Connection``, also one that a pool has lent."""

from __future__ import annotations

import re
from typing import Any

from .base import Adapter, Dialect, Result, Values

GIVES_ROWS = re.compile(r"^\s*(?:SELECT|WITH|VALUES|SHOW)\b|\bRETURNING\b", re.IGNORECASE)
"""asyncpg tells either the rows of a statement or how many it changed, and has to be asked for one of them."""
CHANGED = re.compile(r"\d+$")


class Asyncpg(Adapter):
    """A connection of an event loop."""

    dialect: Dialect = "postgresql"
    awaits = True
    how_to_begin = "async with connection.transaction(): …"
    may_begin = True

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._begun: Any = None

    def in_transaction(self) -> bool:
        return bool(self._connection.is_in_transaction())

    def is_idle(self) -> bool:
        return not self.in_transaction()

    async def begin(self) -> None:
        begun = self._connection.transaction()  # asyncpg's own, so that what is inside may have some, too
        try:
            await begun.start()
        except BaseException:  # nobody knows whether it has begun, and asyncpg may say that it has not
            self._connection.terminate()
            raise
        self._begun = begun

    async def commit(self) -> None:
        await self._begun.commit()
        self._begun = None

    async def roll_back(self) -> None:
        begun, self._begun = self._begun, None
        await begun.rollback()

    async def tidy(self) -> None:
        if self._begun is not None:
            await self.roll_back()

    async def execute(self, sql: str, values: Values = ()) -> Result:
        if GIVES_ROWS.search(sql):
            rows = [tuple(row) for row in await self._connection.fetch(sql, *values)]
            return Result(rows, len(rows))
        counted = CHANGED.search(await self._connection.execute(sql, *values))
        return Result([], int(counted[0]) if counted else 0)

    async def hang_up(self) -> None:
        self._connection.terminate()
