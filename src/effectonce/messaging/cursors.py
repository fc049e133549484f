"""The table of cursors: one row for each ordered source that a consumer reads, moved in the effects' transactions.

``effectonce migrate --cursors URL`` makes it, or your own migrations with the statements of ``schema``. A row is moved
by compare-and-set: whoever made up its mind on another version than the one that is there changes nothing, and has to
roll back. That is what stops a consumer which lost its partition and has not noticed.

A row is as old as its source. After a topic or stream was deleted and made again, its numbers begin anew: delete the
rows of it, or everything would count as done.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, get_args

from ..errors import StoreMismatch, UsageError
from ..stores._named import statements
from ..transactions import Dialect, Result, adapt
from ..transactions.base import is_missing_table
from ._cursor import Cursor

SQL: Final = {dialect: statements(f"{dialect}.sql", __file__) for dialect in get_args(Dialect)}
LONGEST_NAME: Final = 255


def schema(dialect: Dialect) -> list[str]:
    """The statements that make the table, for your migrations. They may be run again."""
    if dialect not in SQL:
        raise UsageError(f"dialect={dialect!r} is not known. Say one of {', '.join(SQL)}.")
    return [SQL[dialect]["schema"]]


class Taken(NamedTuple):
    """A row as it was read."""

    cursor: Cursor
    fence: int
    version: int


class Rows:
    """A consumer's rows, over a connection that is in a transaction."""

    def __init__(self, connection: Any, consumer: str) -> None:
        self.connection, self.adapter = connection, adapt(connection)
        self.adapter.check()
        self._sql, self._consumer = SQL[self.adapter.dialect], consumer

    async def take(self, source: str) -> Taken:
        """Begin with a source: whoever is at it is fenced from now on."""
        await self._do("take", source)
        return await self.lock(source)

    async def lock(self, source: str) -> Taken:
        """The row as it is now; nobody else changes it before this transaction ends."""
        ((fence, version, low, above),) = (await self._do("lock", source)).rows
        text = above.decode() if isinstance(above, bytes) else above
        return Taken(Cursor.read(low, text), fence, version)

    async def move(self, source: str, before: Taken, cursor: Cursor) -> Taken | None:
        """Write how far it has come, if the row is still the one that was read; None if it is not."""
        moved = await self._do("move", source, before.version, cursor.low, cursor.written())
        return Taken(cursor, before.fence, before.version + 1) if moved.changed == 1 else None

    async def _do(self, name: str, source: str, *values: Any) -> Result:
        names: list[Any] = [self._consumer, source]
        if self.adapter.dialect == "mysql":
            names = [each.encode() for each in names]
        try:
            return await self.adapter.execute(self._sql[name], [*names, *values])
        except Exception as error:
            if not is_missing_table(error):
                raise
            raise StoreMismatch(
                "There is no table effectonce_cursors in this database. Run `effectonce migrate --cursors URL`, or the "
                f"statements of effectonce.messaging.cursors.schema({self.adapter.dialect!r})."
            ) from error


__all__ = ["schema"]
