"""Every driver that atomic mode speaks over, by name: its engine, and its desk."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from tests.integration.transaction_desks import AsyncDesk, Desk, Place, finished
from tests.integration.transaction_frameworks import (
    AsyncScopedSession,
    Django,
    ScopedSession,
    SQLAlchemy,
    SQLAlchemyAsync,
)

from effectonce import Policy

T = TypeVar("T")


class SQLite3(Desk):
    async def open(self) -> None:
        self.connection = sqlite3.connect(self.place.path, timeout=30, check_same_thread=False)


class Psycopg(Desk):
    async def open(self) -> None:
        import psycopg

        self.connection = psycopg.connect(self.place.url)


class PsycopgAsync(AsyncDesk):
    async def open(self) -> None:
        import psycopg

        self.connection = await psycopg.AsyncConnection.connect(self.place.url)


class Asyncpg(AsyncDesk):
    async def open(self) -> None:
        import asyncpg

        self.connection = await asyncpg.connect(self.place.url)
        await self.begin()

    async def begin(self) -> None:
        self.transaction = self.connection.transaction()
        await self.transaction.start()

    async def commit(self) -> None:
        await self.transaction.commit()
        await self.begin()

    async def rollback(self) -> None:
        await self.transaction.rollback()
        await self.begin()

    async def close(self) -> None:
        with suppress(Exception):
            await self.transaction.rollback()
        await self.connection.close()


class AsyncpgPool(Asyncpg):
    """What a pool lends, which is no connection but stands for one."""

    async def open(self) -> None:
        import asyncpg

        self.pool = await asyncpg.create_pool(self.place.url, min_size=1, max_size=1)
        self.connection = await self.pool.acquire()
        await self.begin()

    async def close(self) -> None:
        with suppress(Exception):
            await self.transaction.rollback()
        await self.pool.release(self.connection)
        await self.pool.close()


class PyMySQL(Desk):
    async def open(self) -> None:
        import pymysql

        self.connection = pymysql.connect(**self.place.mysql())


class Asyncmy(AsyncDesk):
    async def open(self) -> None:
        import asyncmy

        options = self.place.mysql()
        self.connection = await asyncmy.connect(db=options.pop("database"), **options)

    async def execute(self, sql: str) -> Any:
        async with self.connection.cursor() as cursor:
            await cursor.execute(sql)

    async def close(self) -> None:
        await self.connection.ensure_closed()


def _over(base: type[Desk], driver: str, session: bool = False) -> type[Desk]:
    return type(f"{base.__name__}_{driver}", (base,), {"driver": driver, "session": session})


DRIVERS: dict[str, tuple[str, type[Desk]]] = {
    "sqlite3": ("sqlite", SQLite3),
    "psycopg": ("postgresql", Psycopg),
    "psycopg-async": ("postgresql", PsycopgAsync),
    "asyncpg": ("postgresql", Asyncpg),
    "asyncpg-pool": ("postgresql", AsyncpgPool),
    "pymysql": ("mysql", PyMySQL),
    "asyncmy": ("mysql", Asyncmy),
    "sqlalchemy-sqlite": ("sqlite", _over(SQLAlchemy, "pysqlite")),
    "sqlalchemy-psycopg": ("postgresql", _over(SQLAlchemy, "psycopg")),
    "sqlalchemy-pymysql": ("mysql", _over(SQLAlchemy, "pymysql")),
    "session-sqlite": ("sqlite", _over(SQLAlchemy, "pysqlite", session=True)),
    "session-psycopg": ("postgresql", _over(SQLAlchemy, "psycopg", session=True)),
    "session-pymysql": ("mysql", _over(SQLAlchemy, "pymysql", session=True)),
    "scoped-session-psycopg": ("postgresql", ScopedSession),
    "sqlalchemy-async-aiosqlite": ("sqlite", _over(SQLAlchemyAsync, "aiosqlite")),
    "sqlalchemy-async-psycopg": ("postgresql", _over(SQLAlchemyAsync, "psycopg")),
    "sqlalchemy-async-asyncpg": ("postgresql", _over(SQLAlchemyAsync, "asyncpg")),
    "sqlalchemy-async-asyncmy": ("mysql", _over(SQLAlchemyAsync, "asyncmy")),
    "async-session-aiosqlite": ("sqlite", _over(SQLAlchemyAsync, "aiosqlite", session=True)),
    "async-session-psycopg": ("postgresql", _over(SQLAlchemyAsync, "psycopg", session=True)),
    "async-session-asyncpg": ("postgresql", _over(SQLAlchemyAsync, "asyncpg", session=True)),
    "async-session-asyncmy": ("mysql", _over(SQLAlchemyAsync, "asyncmy", session=True)),
    "async-scoped-session-asyncpg": ("postgresql", AsyncScopedSession),
    "django-sqlite": ("sqlite", _over(Django, "sqlite3")),
    "django-psycopg": ("postgresql", _over(Django, "postgresql")),
    "django-pymysql": ("mysql", _over(Django, "mysql")),
}
"""By name: the engine, and the desk."""
OWN = ("sqlite3", "psycopg", "psycopg-async", "asyncpg", "asyncpg-pool", "pymysql", "asyncmy")
"""Those that begin and commit a transaction for a call."""


class Beside:
    """Somebody else, on a thread of their own: begins at once, ``result()`` waits for the end."""

    def __init__(self, story: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self.begun = threading.Event()
        self._outcome: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(story,))
        self._thread.start()
        assert self.begun.wait(30)

    def _run(self, story: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self.begun.set()
        try:
            self._outcome = asyncio.run(story())
        except BaseException as error:
            self._error = error

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive(), "still waiting"
        if self._error is not None:
            raise self._error
        return self._outcome


REJECT = Policy(busy="reject")

__all__ = ["DRIVERS", "OWN", "REJECT", "Asyncpg", "Beside", "Desk", "Place", "finished"]
