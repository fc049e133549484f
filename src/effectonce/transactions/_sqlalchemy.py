"""Atomic mode over SQLAlchemy 2: ``Connection``, ``Session``, ``AsyncConnection`` and ``AsyncSession``.

Statements go as the driver below wants them, through ``exec_driver_sql``. Savepoints are SQLAlchemy's own, so that a
session flushes into them, and forgets what was undone with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar

from ..errors import UsageError
from .base import GONE_OR_RAISED, Adapter, Dialect, Result, SavepointGone, Style, Values, plain, translated

DIALECTS: dict[str, Dialect] = {
    "sqlite": "sqlite", "postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql",
}  # fmt: skip
STYLES: dict[str, Style] = {
    "qmark": "qmark", "format": "format", "pyformat": "format", "numeric_dollar": "numbered",
}  # fmt: skip

DRIVERS: dict[str, str] = {
    "pysqlite": "_sqlite3:SQLite3", "aiosqlite": "_sqlite3:SQLite3", "pymysql": "_pymysql:PyMySQL",
    "asyncmy": "_asyncmy:Asyncmy", "psycopg": "_psycopg:Psycopg", "psycopg_async": "_psycopg:AsyncPsycopg",
}  # fmt: skip
"""Those that can be told to commit by themselves, and who knows whether they were."""


class _SQLAlchemy(Adapter):
    """What all four share. ``_owner`` is what the user has given."""

    how_to_begin: ClassVar[str] = (
        'leave out isolation_level="AUTOCOMMIT", and what says the same to the driver in connect_args; SQLAlchemy '
        "begins by itself, or: with engine.begin() as connection: …"
    )
    _is_sure = False

    def __init__(self, owner: Any) -> None:
        if hasattr(owner, "registry"):  # a scoped session stands for another one in every task
            owner = owner()
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

    def _commits_alone(self, pooled: Any) -> bool:
        """Whether the driver was told to have every statement committed, without a word to SQLAlchemy."""
        found = DRIVERS.get(self._bind.dialect.driver)
        if found is None:
            return False
        module, _, name = found.partition(":")
        below: Adapter = getattr(import_module(f".{module}", __package__), name)(pooled.driver_connection)
        return not below.in_transaction()

    @contextmanager
    def _living(self, name: str) -> Iterator[Any]:
        """A nested transaction to be released. If its flush fails, it is still there to be rolled back."""
        nested = self._nested.get(name)
        if nested is None or not nested.is_active:
            raise SavepointGone("the transaction around it was ended")
        with GONE_OR_RAISED:
            yield nested
        del self._nested[name]

    def _left(self, name: str) -> Any:
        """A nested transaction to be rolled back."""
        nested = self._nested.pop(name, None)
        if nested is None:
            raise SavepointGone("it has been released")
        return nested

    async def let_go(self, name: str) -> None:
        if name in self._nested:
            await self.roll_back_to(name)

    @staticmethod
    def _result(done: Any) -> Result:
        rows = plain(done.fetchall()) if done.returns_rows else []
        return Result(rows, max(done.rowcount, 0))


class SQLAlchemy(_SQLAlchemy):
    """A Connection or a Session."""

    async def execute(self, sql: str, values: Values = ()) -> Result:
        connection = self._owner.connection() if self._is_session else self._owner
        if not self._is_sure:
            self._make_sure(connection)
        return self._result(connection.exec_driver_sql(*translated(sql, values, self._style)))

    def _make_sure(self, connection: Any) -> None:
        if self._commits_alone(connection.connection):
            if not connection.in_transaction():
                connection.begin()  # as the statement would: a listener may do what the driver does not
            if self._commits_alone(connection.connection):
                raise self.commits_alone()
        self._is_sure = True

    async def savepoint(self, name: str) -> None:
        self._nested[name] = self._owner.begin_nested()

    async def release(self, name: str) -> None:
        with self._living(name) as nested:
            nested.commit()

    async def roll_back_to(self, name: str) -> None:
        with GONE_OR_RAISED:
            self._left(name).rollback()

    async def hang_up(self) -> None:
        connection = self._owner.connection() if self._is_session else self._owner
        connection.invalidate()


class AsyncSQLAlchemy(_SQLAlchemy):
    """An AsyncConnection or an AsyncSession."""

    awaits = True

    async def execute(self, sql: str, values: Values = ()) -> Result:
        connection = await self._owner.connection() if self._is_session else self._owner
        if not self._is_sure:
            await self._make_sure(connection)
        return self._result(await connection.exec_driver_sql(*translated(sql, values, self._style)))

    async def _make_sure(self, connection: Any) -> None:
        below = connection.sync_connection.connection
        if self._commits_alone(below):
            if not connection.in_transaction():
                await connection.begin()
            if self._commits_alone(below):
                raise self.commits_alone()
        self._is_sure = True

    async def savepoint(self, name: str) -> None:
        self._nested[name] = await self._owner.begin_nested()

    async def release(self, name: str) -> None:
        with self._living(name) as nested:
            await nested.commit()

    async def roll_back_to(self, name: str) -> None:
        with GONE_OR_RAISED:
            await self._left(name).rollback()

    async def hang_up(self) -> None:
        connection = await self._owner.connection() if self._is_session else self._owner
        await connection.invalidate()
