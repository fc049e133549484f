"""Every driver that atomic mode speaks over, in one shape for the tests: a desk has a connection and its transaction.

Both colours are coroutines here. Those of blocking drivers never suspend, so the same stories are told of all.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

from effectonce import Message, Outcome, Policy, Receiver
from effectonce.testing.clocks import wait_until

T = TypeVar("T")


class Place:
    """A database with a table of records and a table of effects of a test's own."""

    def __init__(self, dialect: str, url: str, name: str = "") -> None:
        self.dialect, self.url = dialect, url
        self.name = name or uuid4().hex[:12]
        self.effects = f"effects_{self.name}"

    @property
    def store_url(self) -> str:
        """Where the receiver has its records."""
        return self.url if self.dialect == "sqlite" else f"{self.url}?table=records_{self.name}"

    @property
    def path(self) -> str:
        """The file, on SQLite."""
        return self.url.removeprefix("sqlite:///")

    def mysql(self) -> dict[str, Any]:
        """How to connect to MariaDB."""
        parts = urlsplit(self.url)
        return {
            "host": parts.hostname, "port": parts.port, "user": parts.username, "password": parts.password,
            "database": parts.path[1:],
        }  # fmt: skip

    def sqlalchemy(self, driver: str) -> str:
        """A URL for SQLAlchemy."""
        return self.url.replace("mariadb://", "mysql://").replace("://", f"+{driver}://", 1)

    def ask(self, *statements: str) -> list[tuple[Any, ...]]:
        """Have statements done by somebody else, each committed; the rows of the last."""
        connection: Any
        if self.dialect == "sqlite":
            connection = sqlite3.connect(self.path, isolation_level=None, timeout=30)
        elif self.dialect == "postgresql":
            import psycopg

            connection = psycopg.connect(self.url, autocommit=True)
        else:
            import pymysql

            connection = pymysql.connect(**self.mysql(), autocommit=True)
        try:
            cursor = connection.cursor()
            for statement in statements:
                cursor.execute(statement)
            return list(cursor.fetchall()) if cursor.description else []
        finally:
            connection.close()

    def prepare(self) -> None:
        """Make both tables, outside of every transaction that is tested."""
        with Receiver(self.store_url) as receiver:
            receiver.get("nothing")
        self.ask(f"CREATE TABLE {self.effects} (id VARCHAR(100) NOT NULL)")

    def count(self, id: str) -> int:
        """How often an effect has happened, for everyone to see."""
        return int(self.ask(f"SELECT count(*) FROM {self.effects} WHERE id = '{id}'")[0][0])

    def remove(self) -> None:
        if self.dialect == "postgresql":
            self.ask(f"DROP TABLE {self.effects}", f"DROP TABLE IF EXISTS records_{self.name}")
            self.ask(f"DROP FUNCTION IF EXISTS records_{self.name}_put")
        elif self.dialect == "mysql":
            self.ask(f"DROP TABLE {self.effects}", f"DROP TABLE IF EXISTS records_{self.name}")

    def waiters(self) -> int:
        """How many sessions wait for a lock; SQLite does not tell."""
        if self.dialect == "postgresql":
            return int(self.ask("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")[0][0])
        # Not information_schema.innodb_trx: its rows stay as they are for whoever looks more often than every 100 ms.
        return int(self.ask("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")[0][1])

    def wait_for_waiters(self, number: int = 1) -> None:
        """Until so many sessions wait for a lock, where that can be known."""
        if self.dialect != "sqlite":
            wait_until(lambda: self.waiters() >= number)


class Desk:
    """A user's connection, its transaction, and what the user does with them."""

    awaits = False
    connection: Any

    def __init__(self, place: Place) -> None:
        self.place = place

    async def open(self) -> None:
        raise NotImplementedError

    async def execute(self, sql: str) -> Any:
        self.connection.cursor().execute(sql)

    async def begin(self) -> None:
        """Begin, where the driver does not do so by itself."""

    async def commit(self) -> None:
        self.connection.commit()

    async def rollback(self) -> None:
        self.connection.rollback()

    async def close(self) -> None:
        self.connection.close()

    async def savepoint(self) -> None:
        """The user's own, in the transaction that is open."""
        await self.execute("SAVEPOINT mine")

    async def roll_back_to_savepoint(self) -> None:
        """Undo what came after it; it is gone then."""
        await self.execute("ROLLBACK TO SAVEPOINT mine")
        await self.release_savepoint()

    async def release_savepoint(self) -> None:
        """Keep what came after it."""
        await self.execute("RELEASE SAVEPOINT mine")

    async def effect(self, id: str) -> None:
        """The effect, in the transaction."""
        await self.execute(f"INSERT INTO {self.place.effects} VALUES ('{id}')")

    def handler(self, error: BaseException | None = None) -> Callable[[Message], Any]:
        """Makes the effect of a message happen, then returns or raises."""

        async def work(message: Message) -> dict[str, str]:
            await self.effect(message.id)
            if error is not None:
                raise error
            return {"done": message.id}

        return work if self.awaits else lambda message: finished(work(message))

    async def process(
        self, receiver: Receiver, id: str, error: BaseException | None = None, **options: Any
    ) -> Outcome[Any]:
        """Process a message in the transaction."""
        message, on = Message(id=id, payload={"id": id}), receiver.on(self.connection)
        if self.awaits:
            return await on.aprocess(message, self.handler(error), **options)
        return on.process(message, self.handler(error), **options)

    async def batch(
        self,
        receiver: Receiver,
        ids: list[str],
        error: dict[str, BaseException] | None = None,
        **options: Any,
    ) -> list[Outcome[Any]]:
        """Process many messages in the transaction."""
        errors = error or {}

        async def work(message: Message) -> str:
            await self.effect(message.id)
            if message.id in errors:
                raise errors[message.id]
            return message.id

        messages = [Message(id=id, payload={"id": id}) for id in ids]
        on = receiver.on(self.connection)
        if self.awaits:
            return await on.aprocess_batch(messages, work, **options)
        return on.process_batch(messages, lambda message: finished(work(message)), **options)


def finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise AssertionError("a blocking driver's coroutine suspended")


class SQLite3(Desk):
    async def open(self) -> None:
        self.connection = sqlite3.connect(self.place.path, timeout=30, check_same_thread=False)


class Psycopg(Desk):
    async def open(self) -> None:
        import psycopg

        self.connection = psycopg.connect(self.place.url)


class PsycopgAsync(Desk):
    awaits = True

    async def open(self) -> None:
        import psycopg

        self.connection = await psycopg.AsyncConnection.connect(self.place.url)

    async def execute(self, sql: str) -> Any:
        await self.connection.execute(sql)

    async def commit(self) -> None:
        await self.connection.commit()

    async def rollback(self) -> None:
        await self.connection.rollback()

    async def close(self) -> None:
        await self.connection.close()


class Asyncpg(Desk):
    awaits = True

    async def open(self) -> None:
        import asyncpg

        self.connection = await asyncpg.connect(self.place.url)
        await self.begin()

    async def begin(self) -> None:
        self.transaction = self.connection.transaction()
        await self.transaction.start()

    async def execute(self, sql: str) -> Any:
        await self.connection.execute(sql)

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


class Asyncmy(Desk):
    awaits = True

    async def open(self) -> None:
        import asyncmy

        options = self.place.mysql()
        self.connection = await asyncmy.connect(db=options.pop("database"), **options)

    async def execute(self, sql: str) -> Any:
        async with self.connection.cursor() as cursor:
            await cursor.execute(sql)

    async def commit(self) -> None:
        await self.connection.commit()

    async def rollback(self) -> None:
        await self.connection.rollback()

    async def close(self) -> None:
        await self.connection.ensure_closed()


class _SQLAlchemy(Desk):
    driver: str
    session = False

    async def open(self) -> None:
        from sqlalchemy import create_engine
        from sqlalchemy.orm import Session

        self.engine = create_engine(self.place.sqlalchemy(self.driver))
        self.connection = Session(self.engine) if self.session else self.engine.connect()

    async def execute(self, sql: str) -> Any:
        from sqlalchemy import text

        self.connection.execute(text(sql))

    async def savepoint(self) -> None:
        self.nested = self.connection.begin_nested()

    async def roll_back_to_savepoint(self) -> None:
        self.nested.rollback()

    async def release_savepoint(self) -> None:
        self.nested.commit()

    async def close(self) -> None:
        self.connection.close()
        self.engine.dispose()


class ScopedSession(_SQLAlchemy):
    """The session of a thread, by the object that stands for it."""

    driver = "psycopg"

    async def open(self) -> None:
        from sqlalchemy import create_engine
        from sqlalchemy.orm import scoped_session, sessionmaker

        self.engine = create_engine(self.place.sqlalchemy(self.driver))
        self.connection = scoped_session(sessionmaker(self.engine))

    async def close(self) -> None:
        self.connection.remove()
        self.engine.dispose()


class _SQLAlchemyAsync(Desk):
    awaits = True
    driver: str
    session = False

    async def open(self) -> None:
        from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

        self.engine = create_async_engine(self.place.sqlalchemy(self.driver))
        self.connection = AsyncSession(self.engine) if self.session else await self.engine.connect()

    async def execute(self, sql: str) -> Any:
        from sqlalchemy import text

        await self.connection.execute(text(sql))

    async def savepoint(self) -> None:
        self.nested = await self.connection.begin_nested()

    async def roll_back_to_savepoint(self) -> None:
        await self.nested.rollback()

    async def release_savepoint(self) -> None:
        await self.nested.commit()

    async def commit(self) -> None:
        await self.connection.commit()

    async def rollback(self) -> None:
        await self.connection.rollback()

    async def close(self) -> None:
        await self.connection.close()
        await self.engine.dispose()


class AsyncScopedSession(_SQLAlchemyAsync):
    """The session of a task, by the object that stands for it."""

    driver = "asyncpg"

    async def open(self) -> None:
        from sqlalchemy.ext.asyncio import async_scoped_session, async_sessionmaker, create_async_engine

        self.engine = create_async_engine(self.place.sqlalchemy(self.driver))
        self.connection = async_scoped_session(async_sessionmaker(self.engine), asyncio.current_task)


class _Django(Desk):
    """``transaction.atomic`` over a connection of its own, which Django knows by a name that nobody else has."""

    driver: str

    async def open(self) -> None:
        import django
        from django.conf import settings
        from django.db import connections
        from django.db.utils import ConnectionHandler

        if not settings.configured:
            settings.configure()
        django.setup()
        # Stories are told by coroutines, which block here as everywhere; Django would rather not.
        os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "yes"
        if self.driver == "mysql":
            import pymysql

            pymysql.version_info = (2, 2, 8, "final", 0)  # what Django asks of the driver that it knows
            pymysql.install_as_MySQLdb()
        handler = ConnectionHandler(
            {"default": {"ENGINE": f"django.db.backends.{self.driver}", **self.address()}}
        )
        self.connection = handler.create_connection("default")
        self.connection.alias = uuid4().hex
        connections[self.connection.alias] = self.connection
        self.blocks: list[Any] = []
        await self.savepoint()

    def address(self) -> dict[str, Any]:
        if self.place.dialect == "sqlite":
            return {"NAME": self.place.path, "OPTIONS": {"timeout": 30}}
        parts = urlsplit(self.place.url)
        names = ("NAME", "USER", "PASSWORD", "HOST", "PORT")
        return dict(
            zip(
                names,
                (parts.path[1:], parts.username, parts.password or "", parts.hostname, parts.port),
                strict=True,
            )
        )

    async def execute(self, sql: str) -> Any:
        with self.connection.cursor() as cursor:
            cursor.execute(sql)

    async def savepoint(self) -> None:
        """The outermost block is the transaction."""
        from django.db import transaction

        self.blocks.append(transaction.atomic(using=self.connection.alias))
        self.blocks[-1].__enter__()

    async def roll_back_to_savepoint(self) -> None:
        error = RuntimeError("undo it")
        self.blocks.pop().__exit__(RuntimeError, error, None)

    async def release_savepoint(self) -> None:
        self.blocks.pop().__exit__(None, None, None)

    async def commit(self) -> None:
        await self.release_savepoint()
        await self.savepoint()

    async def rollback(self) -> None:
        await self.roll_back_to_savepoint()
        await self.savepoint()

    async def close(self) -> None:
        from django.db import connections

        with suppress(Exception):
            await self.roll_back_to_savepoint()
        self.connection.close()
        del connections[self.connection.alias]


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
    "sqlalchemy-sqlite": ("sqlite", _over(_SQLAlchemy, "pysqlite")),
    "sqlalchemy-psycopg": ("postgresql", _over(_SQLAlchemy, "psycopg")),
    "sqlalchemy-pymysql": ("mysql", _over(_SQLAlchemy, "pymysql")),
    "session-sqlite": ("sqlite", _over(_SQLAlchemy, "pysqlite", session=True)),
    "session-psycopg": ("postgresql", _over(_SQLAlchemy, "psycopg", session=True)),
    "session-pymysql": ("mysql", _over(_SQLAlchemy, "pymysql", session=True)),
    "scoped-session-psycopg": ("postgresql", ScopedSession),
    "sqlalchemy-async-aiosqlite": ("sqlite", _over(_SQLAlchemyAsync, "aiosqlite")),
    "sqlalchemy-async-psycopg": ("postgresql", _over(_SQLAlchemyAsync, "psycopg")),
    "sqlalchemy-async-asyncpg": ("postgresql", _over(_SQLAlchemyAsync, "asyncpg")),
    "sqlalchemy-async-asyncmy": ("mysql", _over(_SQLAlchemyAsync, "asyncmy")),
    "async-session-aiosqlite": ("sqlite", _over(_SQLAlchemyAsync, "aiosqlite", session=True)),
    "async-session-psycopg": ("postgresql", _over(_SQLAlchemyAsync, "psycopg", session=True)),
    "async-session-asyncpg": ("postgresql", _over(_SQLAlchemyAsync, "asyncpg", session=True)),
    "async-session-asyncmy": ("mysql", _over(_SQLAlchemyAsync, "asyncmy", session=True)),
    "async-scoped-session-asyncpg": ("postgresql", AsyncScopedSession),
    "django-sqlite": ("sqlite", _over(_Django, "sqlite3")),
    "django-psycopg": ("postgresql", _over(_Django, "postgresql")),
    "django-pymysql": ("mysql", _over(_Django, "mysql")),
}
"""By name: the engine, and the desk."""


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
