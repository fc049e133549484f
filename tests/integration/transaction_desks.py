"""A user's place and desk: a database with the tables of a test, and a connection to it with its transaction.

Both colours are coroutines here. Those of blocking drivers never suspend, so the same stories are told of all.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

from effectonce import Message, Outcome, Receiver
from effectonce.testing.clocks import wait_until

T = TypeVar("T")


class Place:
    """A database with a table of records and a table of effects of a test's own."""

    def __init__(self, dialect: str, url: str, name: str = "", options: str = "") -> None:
        self.dialect, self.url, self.options = dialect, url, options
        self.name = name or uuid4().hex[:12]
        self.effects = f"effects_{self.name}"

    @property
    def store_url(self) -> str:
        """Where the receiver has its records."""
        if self.dialect == "sqlite":
            return self.url
        return f"{self.url}?table=records_{self.name}{self.options}"

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
        if self.dialect == "sqlite":
            return
        records = f"records_{self.name}"
        kinds = ("", "_sessions", "_requests", "_ring", "_sweep")
        for table in (self.effects, *(f"{records}{kind}" for kind in kinds)):
            self.ask(f"DROP TABLE IF EXISTS {table}")
        if self.dialect == "postgresql":
            self.ask(f"DROP FUNCTION IF EXISTS {records}_put", f"DROP FUNCTION IF EXISTS {records}_turn")

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


class AsyncDesk(Desk):
    """The same, awaited."""

    awaits = True

    async def execute(self, sql: str) -> Any:
        await self.connection.execute(sql)

    async def commit(self) -> None:
        await self.connection.commit()

    async def rollback(self) -> None:
        await self.connection.rollback()

    async def close(self) -> None:
        await self.connection.close()


def finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise AssertionError("a blocking driver's coroutine suspended")
