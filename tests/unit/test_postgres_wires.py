"""Connections to PostgreSQL: how they are opened, and what becomes of them when their loop is gone."""

from __future__ import annotations

import asyncio
import traceback
from types import SimpleNamespace
from typing import Any
from weakref import ref

import psycopg
import pytest

from effectonce.errors import UsageError
from effectonce.stores._postgres_asyncpg import LoopWires
from effectonce.stores._postgres_asyncpg import dialler as asyncpg_dialler
from effectonce.stores._postgres_wire import dialler


class Connection:
    """One that answers, and that can't say goodbye: its loop is closed by then."""

    def is_closed(self) -> bool:
        return False

    async def fetch(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def terminate(self) -> None:
        raise RuntimeError("Event loop is closed")


def test_a_loop_that_was_not_shut_down_in_good_order_leaves_no_connection() -> None:
    """A connection holds its loop, and the loop what belongs to it: nothing here may hold the connection."""

    async def connect() -> Connection:
        return Connection()

    wires = LoopWires(connect, prepare=True, seconds=1.0, most=2)
    asyncio.run(wires.run([SimpleNamespace(statement=SimpleNamespace(text="SELECT"), values=())]))  # type: ignore[list-item]
    connection = ref(wires._stack[0])
    wires.close()
    assert connection() is None


def test_many_statements_of_asyncpg_take_no_more_connections_than_are_kept() -> None:
    """A crowd of claims that go one by one must not take a server's last connections."""
    opened: list[Connection] = []

    async def connect() -> Connection:
        await asyncio.sleep(0)
        opened.append(Connection())
        return opened[-1]

    wires = LoopWires(connect, prepare=True, seconds=1.0, most=4)
    call = SimpleNamespace(statement=SimpleNamespace(text="SELECT"), values=())
    assert asyncio.run(wires.run([call] * 30)) == [[]] * 30  # type: ignore[list-item]
    assert len(opened) == 4


def test_keys_are_sent_in_one_encoding_whatever_the_url_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """URLs of other programs often name one; theirs must not decide how keys are written, nor be in the way."""
    opened: list[dict[str, Any]] = []

    def connect(**parameters: Any) -> Any:
        opened.append(parameters)
        return SimpleNamespace(pgconn=SimpleNamespace(server_version=180000))

    monkeypatch.setattr(psycopg, "connect", connect)
    dialler("postgresql://shop@db/shop?client_encoding=latin1&application_name=shop", 5.0, prepare=True)()
    assert [opened[0][name] for name in ("client_encoding", "application_name")] == ["UTF8", "shop"]


async def opened(connect: Any) -> Any:
    return await connect()


def test_a_port_that_is_no_number_is_told_without_the_password() -> None:
    """The URL is read when a connection is opened, and what can not be read is quoted."""
    connect = asyncpg_dialler("postgresql://shop:hunter2@db:hunter3/shop", 5.0, prepare=True)
    with pytest.raises(UsageError, match="port") as refused:
        asyncio.run(opened(connect))
    assert "hunter2" not in "".join(traceback.format_exception(refused.value))
