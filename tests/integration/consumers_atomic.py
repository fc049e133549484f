"""What the tests of consumers in atomic mode share: a sink in the user's database, and crowds to batter."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

from tests.integration.consumers_helpers import Gate, fell, working
from tests.integration.transaction_drivers import Place

from effectonce import Message, Policy, Receiver
from effectonce.messaging import cursors
from effectonce.outbox import Outbox
from effectonce.outbox._database import open_database
from effectonce.testing.clocks import wait_until

NUMBERED = {
    "sqlite": "INTEGER PRIMARY KEY",
    "postgresql": "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "mysql": "BIGINT AUTO_INCREMENT PRIMARY KEY",
}


class Sink(Place):
    """A database in which every effect is a row. Nothing in it would refuse a second one."""

    def prepare(self) -> None:
        super().prepare()
        self.ask(
            f"DROP TABLE {self.effects}",
            f"CREATE TABLE {self.effects} (place {NUMBERED[self.dialect]}, id VARCHAR(100) NOT NULL)",
            *cursors.schema(self.dialect),  # type: ignore[arg-type]
        )
        with closing(open_database(self.url, f"outbox_{self.name}")) as outbox:
            outbox.migrate()

    def remove(self) -> None:
        super().remove()
        if self.dialect != "sqlite":
            self.ask(f"DROP TABLE outbox_{self.name}")

    def written(self) -> list[str]:
        """The effects, in order."""
        return [id for (id,) in self.ask(f"SELECT id FROM {self.effects} ORDER BY place")]

    def announced(self) -> list[str]:
        """The payloads of events, in order."""
        return [
            bytes(each).decode()
            for (each,) in self.ask(f"SELECT payload FROM outbox_{self.name} ORDER BY seq")
        ]

    def settings(self) -> dict[str, str]:
        return {"dialect": self.dialect, "url": self.url, "name": self.name}

    def receiver(self) -> Receiver:
        return Receiver(self.store_url, consumer=f"billing-{self.name}", policy=Policy(lease="1s"))

    # Transactions, and the handler that writes in them

    @contextmanager
    def blocking(self) -> Iterator[Any]:
        if self.dialect == "sqlite":
            import sqlite3

            with (
                closing(sqlite3.connect(self.path, timeout=60, check_same_thread=False)) as connection,
                connection,
            ):
                connection.execute("BEGIN IMMEDIATE")
                yield connection
        elif self.dialect == "postgresql":
            import psycopg

            with psycopg.connect(self.url) as connection:
                yield connection
        else:
            import pymysql

            with closing(pymysql.connect(**self.mysql())) as connection:
                yield connection
                connection.commit()

    def asyncio(self) -> AbstractContextManager[Any]:
        import psycopg

        return _Connected(psycopg.AsyncConnection.connect(self.url))  # type: ignore[return-value]

    def handle(self, message: Message, connection: Any) -> None:
        order = message.payload["order"]
        connection.cursor().execute(f"INSERT INTO {self.effects} (id) VALUES ('{order}')")
        Outbox(f"outbox_{self.name}").on(connection).add("invoices", order)

    async def ahandle(self, message: Message, connection: Any) -> None:
        order = message.payload["order"]
        await connection.execute(f"INSERT INTO {self.effects} (id) VALUES ('{order}')")
        await Outbox(f"outbox_{self.name}").on(connection).aadd("invoices", order)


class _Connected:
    """A connection that has yet to be made, as a context manager that commits and closes."""

    def __init__(self, connecting: Any) -> None:
        self._connecting = connecting

    async def __aenter__(self) -> Any:
        self._connection = await self._connecting
        return await self._connection.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        await self._connection.__aexit__(*error)


def batter(
    start: Callable[[], AbstractContextManager[subprocess.Popen[str]]],
    folder: Path,
    count: Callable[[], int],
    messages: int,
    is_drained: Callable[[], bool],
    *,
    kills: int = 1,
    members: int = 1,
    seed: int = 7,
) -> None:
    """Have messages consumed by a crowd whose members are killed, or asked to leave, while others come in."""
    random, seconds, gate = Random(seed), 60 + messages / 10, Gate(folder)
    gate.close(messages)

    def wait(condition: Callable[[], bool], what: str) -> None:
        wait_until(lambda: condition() or any(fell(each) for each in crowd), seconds=seconds, what=what)

    with ExitStack() as stack:
        crowd = [stack.enter_context(start()) for _ in range(members)]
        for step in range(1, kills + 1):
            # Early enough to be reached while batches that have begun wait at the gate.
            enough = messages * step // (2 * kills + 6)
            wait(lambda enough=enough: count() >= enough, f"Step {step} of the effects")
            victim = crowd.pop(random.randrange(len(crowd)))
            if step == 1 or random.random() < 0.7:
                victim.kill()
                victim.wait()
            else:
                wait((folder / f"{victim.pid}.ready").exists, "A consumer that can be asked to stop")
                victim.send_signal(signal.SIGTERM)
                assert victim.wait(60) == 0, "it was asked to stop, and should have ended in good order"
            assert count() < messages, "the consumers were too quick to be killed in the middle"
            crowd.append(stack.enter_context(start()))
        gate.open()
        wait(lambda: count() >= messages, "All effects")
        wait(is_drained, "The broker's backlog")


def atomic(
    kind: str, folder: Path, sink: Sink, **settings: Any
) -> AbstractContextManager[subprocess.Popen[str]]:
    """A consumer in atomic mode, in a process of its own."""
    worker = "tests.integration.consumers_atomic_worker"
    return working(kind, folder, worker, sink=sink.settings(), **settings)
