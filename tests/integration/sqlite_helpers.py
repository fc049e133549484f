"""What the tests of the SQLite store share."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from effectonce._blocking import run
from effectonce._records import Claim, Decision, Record
from effectonce.keys import new_owner
from effectonce.stores.base import Store
from effectonce.stores.sqlite import SQLiteStore
from effectonce.testing.clocks import wait_until

ROOT = Path(__file__).parents[2]
LONG = 3600.0


def claim_of(key: str, **changes: Any) -> Claim:
    return Claim(key, new_owner(), b"asked", LONG, LONG)._replace(**changes)


def claim(store: Store, key: str, **changes: Any) -> Decision:
    return run(store.claim(claim_of(key, **changes)))


@contextmanager
def write_lock(path: Path) -> Iterator[None]:
    """Hold the file's write lock, as another process would."""
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


@contextmanager
def connections_opened() -> Iterator[list[sqlite3.Connection]]:
    """The connections that are opened meanwhile, by whomever."""
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def remember(*args: Any, **choices: Any) -> sqlite3.Connection:
        opened.append(connect(*args, **choices))
        return opened[-1]

    with mock.patch.object(sqlite3, "connect", remember):
        yield opened


def commits_in(path: Path) -> int:
    """How many transactions the write-ahead log holds: each ends with a frame that says so."""
    log = path.with_name(path.name + "-wal").read_bytes()
    frame = 24 + int.from_bytes(log[8:12])
    headers = [log[at : at + 16] for at in range(32, len(log), frame)]
    return sum(1 for header in headers if header[8:16] == log[16:24] and any(header[4:8]))


# The group's inside, for tests that need somebody to be in the queue.


def lead(store: SQLiteStore) -> None:
    """Be who writes; everyone else reads or queues up."""
    assert store._group.lead.acquire(blocking=False)


def let_go(store: SQLiteStore) -> None:
    """End what ``lead`` began."""
    store._group.lead.release()


def wait_for_leader(store: SQLiteStore) -> None:
    wait_until(lambda: store._group.lead.locked(), what="A leader")


def wait_for_queue(store: SQLiteStore, count: int) -> None:
    wait_until(lambda: len(store._group.queue) >= count, what=f"A queue of {count}")


def read_beside_a_write(store: SQLiteStore, key: str) -> Record | None:
    """Read on another connection than the writer's, on another thread, while somebody writes."""
    lead(store)
    try:
        record: Record | None = Caller(lambda: run(store.get(key))).answer()
        return record
    finally:
        let_go(store)


class Caller(threading.Thread):
    """A thread that calls a function and keeps what came of it. A daemon: one that hangs fails its own test only."""

    def __init__(self, function: Callable[[], Any], name: str | None = None) -> None:
        super().__init__(daemon=True, name=name)
        self._function = function
        self.result: Any = None
        self.error: BaseException | None = None
        self.began = threading.Event()
        self.start()

    def run(self) -> None:
        self.began.set()
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error

    def answer(self, seconds: float = 20.0) -> Any:
        """The result, or the error raised here."""
        self.join(seconds)
        assert not self.is_alive(), f"{self.name} still waits after {seconds} s"
        if self.error is not None:
            raise self.error
        return self.result


def python(script: str, *arguments: object, **choices: Any) -> subprocess.Popen[str]:
    """Start a script in an interpreter of its own, with effectonce importable and pipes for all it says."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **choices,
    )


def output_of(script: str, *arguments: object) -> str:
    """Run a script to its end and give what it printed; what it complained of fails the test."""
    process = python(script, *arguments)
    output, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, complaints
    assert "ResourceWarning" not in complaints
    return output


CLOSED_IN_THE_MIDDLE = """
import asyncio, sys
from effectonce import Message, Receiver

receiver, ran, left = Receiver(sys.argv[1]), [], []


async def effect(message):
    ran.append(message.id)
    if message.id.startswith("slow"):
        await asyncio.to_thread(close_in_the_middle, "beside " + message.id)
    return message.id


async def leave(name):
    await receiver.aprocess(Message(name + ", first"), effect)
    left.append(asyncio.ensure_future(receiver.aprocess(Message(name + ", left"), effect)))
    left[-1]._log_destroy_pending = False
    await asyncio.sleep(0)


def close_in_the_middle(name):
    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave(name))
    loop.close()


async def main():
    for id_ in ("slow", "slow", "next"):
        print((await receiver.aprocess(Message(id_), effect)).status, ran.count(id_))


close_in_the_middle("before")
asyncio.run(main())
close_in_the_middle("after")
receiver.close()
print("closed")
"""
"""Calls on one loop, while others are closed with a call under way: what a process does to the store that is named."""
TOLD_OF_CLOSED_LOOPS = "executed 1\nreplayed 1\nexecuted 1\nclosed\n"


def files_in(directory: Path) -> list[str]:
    """The names of what is in a directory."""
    return sorted(file.name for file in directory.iterdir())


def open_files(path: Path) -> list[str]:
    """Which of a database's files this process has open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:  # it was the descriptor of this very listing
            continue
        if target.startswith(str(path)):
            found.append(target)
    return sorted(found)
