"""A small database for consumers in atomic mode, whose transactions a test can spoil."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from tests.unit.test_consumers import ListBroker

from effectonce import Message, Policy, Receiver
from effectonce.messaging import cursors
from effectonce.messaging._consumer import Consumer
from effectonce.messaging._delivery import Delivery


class Shop:
    """A database file with a table of effects, and transactions in it of either colour."""

    def __init__(self, folder: Path, awaits: bool) -> None:
        self.path, self.awaits = folder / "shop.db", awaits
        self.receiver = Receiver(f"sqlite:///{self.path}?beside=yes", policy=Policy(max_attempts=2))
        self.receiver.get("nothing")
        self.begun = 0
        self.at_commit: Callable[[], None] = lambda: None
        self.ask(*cursors.schema("sqlite"))
        self.ask("CREATE TABLE effects (id TEXT, place INTEGER PRIMARY KEY)")

    def ask(self, sql: str) -> list[Any]:
        with closing(sqlite3.connect(self.path, isolation_level=None, timeout=30)) as connection:
            return connection.execute(sql).fetchall()

    def effects(self) -> list[str]:
        return [id for (id,) in self.ask("SELECT id FROM effects ORDER BY place")]

    @contextmanager
    def blocking(self) -> Iterator[sqlite3.Connection]:
        self.begun += 1
        with (
            closing(sqlite3.connect(self.path, timeout=30, check_same_thread=False)) as connection,
            connection,
        ):
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            self.at_commit()

    @asynccontextmanager
    async def asyncio(self) -> Any:
        self.begun += 1
        engine = create_async_engine(f"sqlite+aiosqlite:///{self.path}", connect_args={"timeout": 30})
        try:
            async with engine.begin() as connection:
                yield connection
                self.at_commit()
        finally:
            await engine.dispose()

    def consume(self, broker: ListBroker, handler: Callable[[Message], Any], **options: Any) -> ListBroker:
        """Handle a batch: the effect of each message is a row, and ``handler`` has its say after it is written."""
        if not self.awaits:

            def plain(message: Message, connection: sqlite3.Connection) -> Any:
                connection.execute("INSERT INTO effects (id) VALUES (?)", (message.id,))
                return handler(message)

            Consumer(broker, self.receiver, {"transaction": self.blocking, **options}).run_once(plain)  # type: ignore[typeddict-item]
            return broker

        async def coroutine(message: Message, connection: Any) -> Any:
            await connection.execute(text("INSERT INTO effects (id) VALUES (:id)"), {"id": message.id})
            return handler(message)

        consumer = Consumer(broker, self.receiver, {"transaction": self.asyncio, **options})  # type: ignore[typeddict-item]
        asyncio.run(consumer.arun_once(coroutine))
        return broker

    def broker(self, *deliveries: Delivery) -> ListBroker:
        return ListBroker(list(deliveries), awaits=self.awaits)
