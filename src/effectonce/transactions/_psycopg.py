"""Atomic mode over psycopg's ``Connection`` and ``AsyncConnection``. Statements that go together are pipelined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from psycopg import AsyncConnection, AsyncRawCursor, Connection, Pipeline, RawCursor
from psycopg.rows import tuple_row

from ..errors import UsageError
from ..stores._postgres_sql import Statement as PgStatement
from ._psycopg_talk import IDLE, OFF, Spoken, broken_off, may_begin, may_talk, opening, talk
from .base import GONE_OR_RAISED, Adapter, Dialect, Result, Statement, Values, plain

PIPELINES = Pipeline.is_supported()


class _Psycopg(Adapter):
    """What both colours share."""

    dialect: Dialect = "postgresql"
    how_to_begin = "with connection.transaction(): …, or connect without autocommit=True."
    may_begin = True
    _connection: Any

    def may_talk(self) -> bool:
        return self.pipelines and may_talk(self._connection)

    @property
    def server_version(self) -> int:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        return int(self._connection.pgconn.server_version // 10000)

    def check_idle(self) -> None:
        pg = self._connection.pgconn
        if pg.transaction_status == IDLE and pg.pipeline_status == OFF:
            return
        if pg.pipeline_status != OFF and not self.is_closed():
            raise UsageError(
                "This connection is in a pipeline: of another call's at this moment, or of its user's, where nobody is "
                "told whether a transaction was committed before the pipeline ends. One call at a time, and outside of "
                "pipelines; or call without commit=True."
            )
        super().check_idle()

    def is_closed(self) -> bool:
        return bool(self._connection.closed)

    def is_idle(self) -> bool:
        return bool(self._connection.pgconn.transaction_status == IDLE)

    def opening(self) -> PgStatement | None:
        return opening(self._connection) if self.pipelines and may_begin(self._connection) else None

    async def begin(self) -> None:
        statement = opening(self._connection)
        if self.pipelines and may_begin(self._connection):
            await self.talk([(statement, ())])
        else:
            await self.execute_all([(statement.text, ())])

    async def commit(self) -> None:
        await self._command("COMMIT")

    async def roll_back(self) -> None:
        await self._command("ROLLBACK")

    async def savepoint(self, name: str) -> None:
        await self._command(f"SAVEPOINT {name}")

    async def release(self, name: str) -> None:
        with GONE_OR_RAISED:
            await self._command(f"RELEASE SAVEPOINT {name}")

    async def move_on(self, name: str, to: str) -> None:
        with GONE_OR_RAISED:
            await self._command(f"RELEASE SAVEPOINT {name}", f"SAVEPOINT {to}")

    async def roll_back_to(self, name: str) -> None:
        with GONE_OR_RAISED:
            await self._command(f"ROLLBACK TO SAVEPOINT {name}", f"RELEASE SAVEPOINT {name}")

    async def _command(self, *commands: str) -> None:
        """Have commands done; past psycopg's cursors, which at a ROLLBACK have all that is prepared forgotten."""
        if self.may_talk():
            await self.talk([(command, ()) for command in commands])
        else:
            await self.execute_all([(command, ()) for command in commands])

    async def execute(self, sql: str, values: Values = ()) -> Result:
        (result,) = await self.execute_all(((sql, values),))
        return result

    async def hang_up(self) -> None:
        self._connection.pgconn.finish()

    def _is_piped(self, statements: Sequence[Statement]) -> bool:
        """Several go as a pipeline; in one of the user's own, even one has its answer only at the end of a pipeline."""
        return self.pipelines and (len(statements) > 1 or self._connection.pgconn.pipeline_status != 0)

    def in_transaction(self) -> bool:
        return not (self._connection.autocommit and self.is_idle())


class Psycopg(_Psycopg):
    """A blocking connection."""

    def __init__(self, connection: Connection[Any]) -> None:
        self._connection = connection
        self._cursor: Callable[[], Any] = lambda: RawCursor(connection, row_factory=tuple_row)
        self.pipelines = PIPELINES

    async def talk(self, calls: Sequence[Spoken]) -> list[Result]:
        connection = self._connection
        with connection.lock:
            try:
                return connection.wait(talk(connection, calls))  # type: ignore[no-any-return]
            except BaseException:
                broken_off(connection)
                raise

    async def execute_all(self, statements: Sequence[Statement]) -> list[Result]:
        with self._connection.pipeline() if self._is_piped(statements) else nullcontext():
            cursors = [self._cursor().execute(sql.encode(), values or None) for sql, values in statements]
        return [self._result(cursor) for cursor in cursors]

    @staticmethod
    def _result(cursor: Any) -> Result:
        rows = plain(cursor.fetchall()) if cursor.description else []
        return Result(rows, max(cursor.rowcount, 0))


class AsyncPsycopg(_Psycopg):
    """A connection of an event loop."""

    awaits = True
    how_to_begin = "async with connection.transaction(): …, or connect without autocommit=True."

    def __init__(self, connection: AsyncConnection[Any]) -> None:
        self._connection = connection
        self._cursor: Callable[[], Any] = lambda: AsyncRawCursor(connection, row_factory=tuple_row)
        self.pipelines = PIPELINES

    async def talk(self, calls: Sequence[Spoken]) -> list[Result]:
        connection = self._connection
        async with connection.lock:
            try:
                return await connection.wait(talk(connection, calls))  # type: ignore[no-any-return]
            except BaseException:
                broken_off(connection)
                raise

    async def execute_all(self, statements: Sequence[Statement]) -> list[Result]:
        async with self._connection.pipeline() if self._is_piped(statements) else nullcontext():
            cursors = [
                await self._cursor().execute(sql.encode(), values or None) for sql, values in statements
            ]
        return [await self._result(cursor) for cursor in cursors]

    @staticmethod
    async def _result(cursor: Any) -> Result:
        rows = plain(await cursor.fetchall()) if cursor.description else []
        return Result(rows, max(cursor.rowcount, 0))
