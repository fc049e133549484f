"""The table of cursors on every engine and driver: compare-and-set, zombies, lost replies, migrations.

The broker is made of lists, so that a rebalance is a line of the test; databases and drivers are real.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.integration.transaction_drivers import Place
from tests.unit.test_consumers_cursor import Numbered, at

from effectonce import Message, Receiver
from effectonce.messaging._consumer import Consumer
from effectonce.messaging._delivery import Ack
from effectonce.ops.cli import main

DRIVERS = ["sqlite3", "aiosqlite", "psycopg", "psycopg_async", "asyncpg", "pymysql", "asyncmy"]
SERVERS = {"postgresql": "postgres", "mysql": "mariadb"}


class Base(Place):
    """A database with a table of effects, and transactions over one driver."""

    driver: str

    @property
    def awaits(self) -> bool:
        return self.driver in ("aiosqlite", "psycopg_async", "asyncpg", "asyncmy")

    def begin(self) -> Any:
        return getattr(self, self.driver)()

    @contextmanager
    def sqlite3(self) -> Iterator[Any]:
        import sqlite3

        with (
            closing(sqlite3.connect(self.path, timeout=30, check_same_thread=False)) as connection,
            connection,
        ):
            yield connection

    @asynccontextmanager
    async def aiosqlite(self) -> Any:
        from sqlalchemy.ext.asyncio import create_async_engine

        engine = create_async_engine(f"sqlite+aiosqlite:///{self.path}", connect_args={"timeout": 30})
        try:
            async with engine.begin() as connection:
                yield connection
        finally:
            await engine.dispose()

    def psycopg(self) -> Any:
        import psycopg

        return psycopg.connect(self.url)

    @asynccontextmanager
    async def psycopg_async(self) -> Any:
        import psycopg

        async with await psycopg.AsyncConnection.connect(self.url) as connection:
            yield connection

    @asynccontextmanager
    async def asyncpg(self) -> Any:
        import asyncpg

        connection = await asyncpg.connect(self.url)
        try:
            async with connection.transaction():
                yield connection
        finally:
            await connection.close()

    @contextmanager
    def pymysql(self) -> Iterator[Any]:
        import pymysql

        with closing(pymysql.connect(**self.mysql())) as connection:
            yield connection
            connection.commit()

    @asynccontextmanager
    async def asyncmy(self) -> Any:
        import asyncmy

        settings = self.mysql()
        connection = await asyncmy.connect(**(settings | {"db": settings.pop("database")}))
        try:
            yield connection
            await connection.commit()
        finally:
            connection.close()

    def happened(self) -> list[str]:
        return sorted(id for (id,) in self.ask(f"SELECT id FROM {self.effects}"))

    def row(self, consumer: str) -> tuple[int, str]:
        asked = f"SELECT low, above FROM effectonce_cursors WHERE consumer = '{consumer}'"
        ((low, above),) = self.ask(asked)
        return int(low), above.decode() if isinstance(above, bytes) else above


@pytest.fixture(params=DRIVERS)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Base]:
    """A database over each driver in turn."""
    dialect = {"sqlite3": "sqlite", "aiosqlite": "sqlite", "pymysql": "mysql", "asyncmy": "mysql"}.get(
        request.param, "postgresql"
    )
    url = (
        f"sqlite:///{tmp_path / 'shop.db'}"
        if dialect == "sqlite"
        else request.getfixturevalue(SERVERS[dialect]).url
    )
    base = Base(dialect, url)
    base.driver = request.param
    for _ in range(2):
        assert main(["migrate", "--cursors", url]) == 0
    base.ask(f"CREATE TABLE {base.effects} (id VARCHAR(100) NOT NULL)")
    yield base
    base.ask(f"DROP TABLE {base.effects}")


class Member:
    """A consumer that is handed batches."""

    def __init__(self, base: Base, receiver: Receiver) -> None:
        self.base, self.broker = base, Numbered(awaits=base.awaits)
        self.broker.group = base.name
        self._consumer = Consumer(self.broker, receiver, {"transaction": base.begin, "cursor": True})
        self.ran: list[str] = []
        self.failing: set[str] = set()
        self.meanwhile: Callable[[], None] = lambda: None

    def get(self, *numbers: int) -> list[Any]:
        """Be delivered messages; what the broker is told of each."""
        self.broker.told.clear()
        self.broker.batches.append([at(number) for number in numbers])
        if not self.base.awaits:
            self._consumer.run_once(self._handle)
        else:
            asyncio.run(self._consumer.arun_once(self._ahandle))
        return [verdict for _, verdict in self.broker.told]

    def _begin(self, message: Message) -> str:
        self.ran.append(message.id)
        return f"INSERT INTO {self.base.effects} (id) VALUES ('{message.id}')"

    def _end(self, message: Message) -> None:
        self.meanwhile()
        if message.id in self.failing:
            raise ValueError("not today")

    def _handle(self, message: Message, connection: Any) -> None:
        connection.cursor().execute(self._begin(message))
        self._end(message)

    async def _ahandle(self, message: Message, connection: Any) -> None:
        statement = self._begin(message)
        if self.base.driver == "aiosqlite":
            await connection.exec_driver_sql(statement)
        elif self.base.driver == "asyncmy":
            async with connection.cursor() as cursor:
                await cursor.execute(statement)
        else:
            await connection.execute(statement)
        await asyncio.to_thread(self._end, message)


@pytest.fixture
def member(base: Base) -> Iterator[Callable[[], Member]]:
    with Receiver("memory://") as receiver:
        yield lambda: Member(base, receiver)


def test_it_moves_with_the_effects_and_counts_failures(base: Base, member: Callable[[], Member]) -> None:
    """What is committed is committed together, and a failure leaves its count alone."""
    one = member()
    one.failing = {"m-3"}
    assert [type(verdict) for verdict in one.get(1, 2, 3, 4)][:2] == [Ack, Ack]
    assert base.happened() == ["m-1", "m-2"]
    assert base.row(base.name) == (3, ";3=1")
    one.failing.clear()
    one.get(2, 3, 4)
    assert base.happened() == ["m-1", "m-2", "m-3", "m-4"]
    assert base.row(base.name) == (5, "")


def test_a_zombie_is_refused_by_compare_and_set(base: Base, member: Callable[[], Member]) -> None:
    """Another consumer takes the source while a handler of the first runs: all that the first did is rolled back."""
    zombie, successor = member(), member()
    zombie.get(1)

    def take_over() -> None:
        zombie.meanwhile = lambda: None
        # Where whoever writes is alone, a successor can only come before or after.
        if base.dialect == "sqlite":
            return
        assert [type(verdict) for verdict in successor.get(2, 3)] == [Ack, Ack]

    if base.dialect == "sqlite":
        successor.get(2, 3)
    zombie.meanwhile = take_over
    verdicts = zombie.get(2, 3)
    assert [verdict.reason for verdict in verdicts] == ["lease_lost", "lease_lost"]
    assert base.happened() == ["m-1", "m-2", "m-3"]
    if base.dialect != "sqlite":
        assert zombie.ran == ["m-1", "m-2", "m-3"], "it ran, and was rolled back"
    assert [verdict.replayed for verdict in zombie.get(2, 3)] == [True, True]
    assert base.row(base.name) == (4, "")


def test_a_commit_without_a_reply_is_not_run_again(base: Base, member: Callable[[], Member]) -> None:
    """The connection breaks after COMMIT: the row says that it was this consumer's own."""
    one = member()
    one.get(1)
    begin, lost = base.begin, [True]

    @contextmanager
    def blocking() -> Any:
        with begin() as connection:
            yield connection
        if lost and lost.pop():
            raise ConnectionResetError("the reply to COMMIT got lost")

    @asynccontextmanager
    async def awaiting() -> Any:
        async with begin() as connection:
            yield connection
        if lost and lost.pop():
            raise ConnectionResetError("the reply to COMMIT got lost")

    handling: Any = one._consumer._handling
    handling._begin = awaiting if base.awaits else blocking
    assert [verdict.replayed for verdict in one.get(2, 3)] == [True, True]
    assert base.happened() == ["m-1", "m-2", "m-3"]
    assert not lost
