"""What the tests of consumers share: books that check fences, and consumer processes to kill."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from effectonce import Message, Policy, Receiver, current
from effectonce.testing.clocks import wait_until

ROOT = Path(__file__).parents[2]
LEASE = "1s"
STORM = pytest.mark.timeout(300)
"""A storm ends itself, stage by stage, and says what it was waiting for; on a busy machine all stages take long."""
SIZES = pytest.mark.parametrize(
    "messages", [pytest.param(200, marks=STORM), pytest.param(10_000, marks=pytest.mark.soak)]
)
BATCH, SIDE_BY_SIDE = 20, 4


class Books:
    """The outside world, in a file: an effect per key, refused to an older fence; and every run of a handler."""

    def __init__(self, path: Path) -> None:
        self._path, self.folder = path, path.parent
        with self._open() as connection:
            connection.executescript(
                "PRAGMA journal_mode = WAL;"
                "CREATE TABLE IF NOT EXISTS effects ("
                "place INTEGER PRIMARY KEY, key TEXT UNIQUE, fence INTEGER, effect TEXT);"
                "CREATE TABLE IF NOT EXISTS runs (effect TEXT);"
            )

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self._path, timeout=30.0, isolation_level=None)
        try:
            connection.execute("PRAGMA synchronous = OFF")
            yield connection
        finally:
            connection.close()

    def apply(self, effect: str) -> str:
        """Write the running attempt's effect, unless it is there; an older fence than one that was here is refused."""
        attempt = current()
        key, fence = attempt.key_for("effect"), attempt.fence
        with self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO runs VALUES (?)", (effect,))
            known = connection.execute("SELECT fence FROM effects WHERE key = ?", (key,)).fetchone()
            if known is None:
                connection.execute(
                    "INSERT INTO effects (key, fence, effect) VALUES (?, ?, ?)", (key, fence, effect)
                )
            elif fence < known[0]:
                connection.execute("COMMIT")
                raise RuntimeError(f"{key}: fence {fence} after {known[0]}")
            else:
                connection.execute("UPDATE effects SET fence = ? WHERE key = ?", (fence, key))
            connection.execute("COMMIT")
        return effect

    def effects(self) -> list[str]:
        """What has happened, in order."""
        with self._open() as connection:
            return [effect for (effect,) in connection.execute("SELECT effect FROM effects ORDER BY place")]

    def runs(self) -> int:
        with self._open() as connection:
            return int(connection.execute("SELECT count(*) FROM runs").fetchone()[0])


class Gate:
    """Keeps the last orders from being handled until it is opened, so that a kill comes before the end for sure."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "gate"

    def close(self, messages: int) -> None:
        self._path.write_text(str(messages * 4 // 5))

    def open(self) -> None:
        self._path.unlink()

    def pass_(self, order: str) -> None:
        """Wait, in a handler, until an order may be handled."""
        wait_until(lambda: not self._keeps(order), seconds=60, what="The gate")

    def _keeps(self, order: str) -> bool:
        try:
            return int(order[2:]) >= int(self._path.read_text())
        except FileNotFoundError:
            return False


def handled(books: Books, message: Message) -> str:
    """Write a message's effect."""
    order: str = message.payload["order"]
    Gate(books.folder).pass_(order)
    return books.apply(order)


@contextmanager
def working(
    kind: str, folder: Path, worker: str = "tests.integration.consumers_worker", **settings: Any
) -> Iterator[subprocess.Popen[str]]:
    """A consumer in a process of its own; ``folder`` has its store and the books."""
    arguments = [
        sys.executable,
        "-m",
        worker,
        kind,
        str(folder),
        json.dumps(settings),
    ]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    process = subprocess.Popen(arguments, env=environment, cwd=ROOT, text=True, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def receiver_in(folder: Path, **changes: Any) -> Receiver:
    policy = Policy(lease=LEASE, busy="reject", **changes)
    return Receiver(f"sqlite:///{folder / 'store.db'}", consumer="billing", policy=policy)


class SlowClock:
    """A receiver's clock that is an hour behind for its first looks: to it, what a broker stamps is in the future."""

    def __init__(self, looks: int = 1) -> None:
        self._behind = looks

    def __call__(self) -> float:
        self._behind -= 1
        return time.time() - (3600 if self._behind >= 0 else 0)


def deliveries(count: int) -> list[str]:
    """Ids of orders, each one to four times, repetitions near and far."""
    random = Random(7)
    names = [f"o-{number}" for number in range(count) for _ in range(random.randint(1, 4))]
    return sorted(names, key=lambda name: int(name[2:]) + random.random() * count / 4)


def storm(
    kind: str,
    folder: Path,
    messages: int,
    is_drained: Callable[[], bool],
    again: int = BATCH,
    **settings: Any,
) -> list[str]:
    """Have messages consumed, kill the consumer in the middle, let another go on; the effects, each seen to be one.

    ``is_drained`` says when the broker has nothing left to deliver; ``again`` is how many handlers may run twice.
    """
    books, gate = Books(folder / "books.db"), Gate(folder)
    seconds = 60 + messages / 10
    gate.close(messages)
    with working(kind, folder, **settings) as doomed:
        wait_until(lambda: len(books.effects()) >= messages // 4 or fell(doomed), seconds=seconds)
        doomed.send_signal(signal.SIGKILL)
        doomed.wait()
    assert len(books.effects()) < messages, "the consumer was too quick to be killed in the middle"
    gate.open()
    with working(kind, folder, **settings) as second:
        wait_until(lambda: len(books.effects()) >= messages or fell(second), seconds=seconds)
        wait_until(lambda: is_drained() or fell(second), seconds=seconds, what="The broker's backlog")
        wait_until((folder / f"{second.pid}.ready").exists)
        second.send_signal(signal.SIGTERM)
        assert second.wait(30) == 0, "it was asked to stop, and should have ended in good order"
    counts = Counter(books.effects())
    assert len(counts) == messages
    assert set(counts.values()) == {1}
    assert books.runs() <= messages + again, "only what the kill caught in its batch may run again"
    return books.effects()


def stop_when(consumer: Any, condition: Callable[[], object], deadline: float) -> None:
    """Have a consumer look at a condition before every round of its loop."""
    broker = consumer._broker
    fetch = broker.fetch

    async def fetch_and_look(most: int) -> Any:
        if condition():
            consumer.stop()
            return ()
        assert time.monotonic() < deadline
        return await fetch(most)

    broker.fetch = fetch_and_look


def fell(process: subprocess.Popen[str]) -> bool:
    """Whether a consumer has ended by itself, which is an error to be shown."""
    if process.poll() is None:
        return False
    assert process.stderr is not None
    raise AssertionError(f"the consumer ended: {process.stderr.read()[-4000:]}")
