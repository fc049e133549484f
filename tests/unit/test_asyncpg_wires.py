"""asyncpg's connections of one event loop: what becomes of them when the loop is gone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from weakref import ref

from effectonce.stores._postgres_asyncpg import LoopWires


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
