"""The outbox over every kind of connection, and together with atomic mode: one commit for everything, or nothing."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.integration.outbox_helpers import Broker, World, mariadb_world, postgres_world, sqlite_world

from effectonce import Message, Receiver
from effectonce.errors import ColourMismatch, UsageError


@pytest.fixture
def on_sqlite(tmp_path: Path) -> Iterator[World]:
    yield from _made(sqlite_world(tmp_path))


@pytest.fixture
def on_postgres(postgres: Any) -> Iterator[World]:
    yield from _made(postgres_world(postgres.url))


@pytest.fixture
def on_mariadb(mariadb: Any) -> Iterator[World]:
    yield from _made(mariadb_world(mariadb.url))


def _made(world: World) -> Iterator[World]:
    with closing(world.database()) as database:
        database.migrate()
    yield world
    world.remove()


def payloads(world: World) -> list[str]:
    """What is published now."""
    broker = Broker()
    with world.relay(broker) as relay:
        relay.run_once()
    return broker.payloads


# Connections that are awaited


async def with_psycopg(world: World, use: Callable[[Any], Awaitable[None]], commit: bool) -> None:
    import psycopg

    async with await psycopg.AsyncConnection.connect(world.url) as connection:
        await use(connection)
        await (connection.commit() if commit else connection.rollback())


async def with_asyncpg(world: World, use: Callable[[Any], Awaitable[None]], commit: bool) -> None:
    import asyncpg

    connection = await asyncpg.connect(world.url)
    transaction = connection.transaction()
    await transaction.start()
    await use(connection)
    await (transaction.commit() if commit else transaction.rollback())
    await connection.close()


async def with_sqlalchemy(world: World, use: Callable[[Any], Awaitable[None]], commit: bool) -> None:
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    engine = create_async_engine(world.url.replace("postgresql://", "postgresql+psycopg://"))
    async with AsyncSession(engine) as session:
        await use(session)
        await (session.commit() if commit else session.rollback())
    await engine.dispose()


async def with_asyncmy(world: World, use: Callable[[Any], Awaitable[None]], commit: bool) -> None:
    import asyncmy

    parts = urlsplit(world.url)
    login = {"host": parts.hostname, "port": parts.port, "user": parts.username, "password": parts.password}
    connection = await asyncmy.connect(**login, database=parts.path[1:])
    await connection.begin()
    await use(connection)
    await (connection.commit() if commit else connection.rollback())
    connection.close()


@pytest.mark.parametrize(
    ("fixture", "within"),
    [
        pytest.param("on_postgres", with_psycopg, id="psycopg"),
        pytest.param("on_postgres", with_asyncpg, id="asyncpg"),
        pytest.param("on_postgres", with_sqlalchemy, id="sqlalchemy"),
        pytest.param("on_mariadb", with_asyncmy, id="asyncmy"),
    ],
)
def test_connections_that_are_awaited(request: pytest.FixtureRequest, fixture: str, within: Any) -> None:
    """aadd() is part of the transaction; the blocking form is refused."""
    world: World = request.getfixturevalue(fixture)

    async def use(connection: Any) -> None:
        writer = world.outbox.on(connection)
        await writer.aadd("t", {"ü": 1}, key="k", headers={"a": "b"})
        with pytest.raises(ColourMismatch, match="aadd"):
            writer.add("t", 2)

    asyncio.run(within(world, use, commit=False))
    assert payloads(world) == []
    asyncio.run(within(world, use, commit=True))
    assert payloads(world) == ['{"ü":1}']


def test_a_session_of_sqlalchemy(on_sqlite: World) -> None:
    """Session and Connection of SQLAlchemy, blocking."""
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session

    engine = create_engine(on_sqlite.url)
    with Session(engine) as session:
        on_sqlite.outbox.on(session).add("t", "session")
        session.commit()
        on_sqlite.outbox.on(session).add("t", "lost")
        session.rollback()
    with engine.begin() as connection:
        on_sqlite.outbox.on(connection).add("t", "connection")
    engine.dispose()
    assert payloads(on_sqlite) == ["session", "connection"]


def test_a_connection_without_a_transaction_is_refused(on_sqlite: World) -> None:
    """An event that is committed alone belongs to no change."""
    path = on_sqlite.url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection, pytest.raises(UsageError):
        on_sqlite.outbox.on(connection).add("t", 1)
    assert payloads(on_sqlite) == []


# With the receiver's record in the same transaction


@pytest.mark.parametrize("fixture", ["on_postgres", "on_mariadb"])
def test_record_and_events_commit_together(request: pytest.FixtureRequest, fixture: str) -> None:
    """In atomic mode a message is handled, remembered and told of in one commit; a rollback leaves none of it."""
    world: World = request.getfixturevalue(fixture)
    ids: list[str] = []

    def handle(message: Message) -> str:
        ids.append(world.outbox.on(connection).add("t", message.id, key="k"))
        return "done"

    table = f"{world.table}_r"
    with Receiver(f"{world.url}?table={table}") as receiver, closing(world.connect()) as connection:
        receiver.process(Message("warm-up"), lambda _: None)
        receiver.on(connection).process(Message("m-1"), handle)
        connection.rollback()
        assert payloads(world) == []
        for replayed in (False, True):
            assert receiver.on(connection).process(Message("m-1"), handle).replayed is replayed
            connection.commit()
    assert payloads(world) == ["m-1"]
    assert ids[0] == ids[1]
    assert len(ids) == 2
    world.do(f"DROP TABLE {table}")
