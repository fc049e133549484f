"""Atomic mode over SQLAlchemy 2: ``Connection``, ``Session``, ``AsyncConnection`` and ``AsyncSession``.

Statements go as the driver below wants them, through ``exec_driver_sql``. Savepoints are SQLAlchemy's own, so that a
session flushes into them, and forgets what was undone with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from ..errors import UsageError
from .base import GONE_OR_RAISED, Adapter, Dialect, Result, SavepointGone, Style, Values, plain, translated

DIALECTS: dict[str, Dialect] = {
    "sqlite": "sqlite", "postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql",
}  # fmt: skip
STYLES: dict[str, Style] = {
    "qmark": "qmark", "format": "format", "pyformat": "format", "numeric_dollar": "numbered",
}  # fmt: skip


class _SQLAlchemy(Adapter):
    """What all four share. ``_owner`` is what the user has given."""

    how_to_begin: ClassVar[str] = (
        'leave out isolation_level="AUTOCOMMIT"; SQLAlchemy begins by itself, or: with engine.begin() as connection: …'
    )

    def __init__(self, owner: Any) -> None:
        self._is_session = not hasattr(owner, "exec_driver_sql")
        self._bind = owner.get_bind() if self._is_session else getattr(owner, "sync_connection", owner)
        if self._bind is None:
            raise UsageError(
                "This AsyncConnection has not been started: async with engine.connect() as connection: …"
            )
        dialect = self._bind.dialect
        if dialect.name not in DIALECTS or dialect.paramstyle not in STYLES:
            raise UsageError(
                f"effectonce has no table for SQLAlchemy's {dialect.name} over {dialect.driver}."
            )
        self.dialect = DIALECTS[dialect.name]
        self.is_mariadb = bool(getattr(dialect, "is_mariadb", False))
        self._style: Style = STYLES[dialect.paramstyle]
        self._owner = owner
        self._nested: dict[str, Any] = {}

    def in_transaction(self) -> bool:
        """Whether it is one: SQLAlchemy begins by itself, unless it was told to have every statement committed."""
        chosen = self._bind.get_execution_options().get("isolation_level")
        return (chosen or getattr(self._bind.dialect, "_on_connect_isolation_level", None)) != "AUTOCOMMIT"

    @contextmanager
    def _living(self, name: str) -> Iterator[Any]:
        """A nested transaction to be released. If its flush fails, it is still there to be rolled back."""
        nested = self._nested[name]
        if not nested.is_active:
            raise SavepointGone("the transaction around it was ended")
        with GONE_OR_RAISED:
            yield nested
        del self._nested[name]

    @staticmethod
    def _result(done: Any) -> Result:
        rows = plain(done.fetchall()) if done.returns_rows else []
        return Result(rows, max(done.rowcount, 0))


class SQLAlchemy(_SQLAlchemy):
    """A Connection or a Session."""

    async def execute(self, sql: str, values: Values = ()) -> Result:
        connection = self._owner.connection() if self._is_session else self._owner
        return self._result(connection.exec_driver_sql(*translated(sql, values, self._style)))

    async def savepoint(self, name: str) -> None:
        self._nested[name] = self._owner.begin_nested()

    async def release(self, name: str) -> None:
        with self._living(name) as nested:
            nested.commit()

    async def roll_back_to(self, name: str) -> None:
        with GONE_OR_RAISED:
            self._nested.pop(name).rollback()


class AsyncSQLAlchemy(_SQLAlchemy):
    """An AsyncConnection or an AsyncSession."""

    awaits = True

    async def execute(self, sql: str, values: Values = ()) -> Result:
        connection = await self._owner.connection() if self._is_session else self._owner
        return self._result(await connection.exec_driver_sql(*translated(sql, values, self._style)))

    async def savepoint(self, name: str) -> None:
        self._nested[name] = await self._owner.begin_nested()

    async def release(self, name: str) -> None:
        with self._living(name) as nested:
            await nested.commit()

    async def roll_back_to(self, name: str) -> None:
        with GONE_OR_RAISED:
            await self._nested.pop(name).rollback()
