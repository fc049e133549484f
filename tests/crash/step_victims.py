"""Victims with steps: processes that are killed before, in and after each of them, or at any moment.

A victim's handler fails once after two of its steps, is repeated, and has two more side by side: threads in blocking
code, tasks on an event loop. Points are the moments before and after each command to the store and each effect. What
a handler was given is noted when it was: from then on nobody may run that step again. Run by ``test_step_kills``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.crash.sink import SinkFile
from tests.crash.victims import Order, Tick, count_commands, fork_victims

from effectonce import Message, Policy, Receiver, current
from effectonce.steps import Journal

LEASE = 1.5
FIRST, BOTH, LAST = ("reserve", "charge"), ("label", "ship"), "mail"
STEPS = (*FIRST, *BOTH, LAST)
SCHEMA = """
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS effects (key TEXT PRIMARY KEY, id TEXT, step TEXT);
CREATE TABLE IF NOT EXISTS tries (id TEXT, step TEXT);
"""


class Stumbled(Exception):
    """The handler's own word that it failed."""


class Sink(SinkFile):
    """The outside world: does what it is asked once for each derived key, and counts how often it was asked."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, SCHEMA)

    def apply(self, id: str, step: str) -> str:
        """Make an effect happen, unless it has."""
        key = current().key_for("sink")
        with self._lock, self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO tries VALUES (?, ?)", (id, step))
            connection.execute("INSERT OR IGNORE INTO effects VALUES (?, ?, ?)", (key, id, step))
        return f"{id} {step}"

    def ask(self, sql: str, id: str) -> list[str]:
        """Steps of one victim, in their order."""
        return sorted((step for (step,) in self._connection.execute(sql, (id,))), key=STEPS.index)

    def effects(self, id: str) -> list[str]:
        """What has happened, as often as it has."""
        return self.ask("SELECT step FROM effects WHERE id = ?", id)

    def tries(self, id: str) -> list[str]:
        """What was asked for, as often as it was."""
        return self.ask("SELECT step FROM tries WHERE id = ?", id)


class Worker:
    """A process with a receiver on the shared store."""

    def __init__(
        self,
        store: str,
        sink: Path,
        tick: Tick = lambda: None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.sink, self._tick, self._note = Sink(sink), tick, note
        self.receiver = Receiver(store, policy=Policy(lease=LEASE, busy="reject"), breaker=None)
        count_commands(self.receiver, tick)

    def effect(self, id: str, step: str) -> str:
        self._tick()
        done = self.sink.apply(id, step)
        self._tick()
        return done

    def handle(self, message: Message) -> list[str]:
        """Two steps, a failure the first time, two steps side by side, and a last one."""
        attempt, id = current(), message.id

        def do(step: str) -> str:
            return self._given(step, attempt.step(step, self.effect, id, step))

        done = [do(step) for step in FIRST]
        if attempt.number == 1:
            raise Stumbled
        with ThreadPoolExecutor(2) as threads:
            done += threads.map(do, BOTH)
        return [*done, do(LAST)]

    async def ahandle(self, message: Message) -> list[str]:
        """The same on an event loop."""
        attempt, id = current(), message.id

        async def do(step: str) -> str:
            return self._given(step, await attempt.astep(step, self.effect, id, step))

        done = [await do(step) for step in FIRST]
        if attempt.number == 1:
            raise Stumbled
        done += await asyncio.gather(*map(do, BOTH))
        return [*done, await do(LAST)]

    def process(self, id: str, awaits: bool) -> Any:
        """Process a message until it has its answer."""
        message = Message(id)
        if awaits:
            return asyncio.run(self.receiver.aprocess(message, self.ahandle)).value
        return self.receiver.process(message, self.handle).value

    def _given(self, step: str, value: str) -> str:
        self._note(step)
        return value

    def close(self) -> None:
        self.receiver.close()
        self.sink.close()


def live(order: Order, tick: Tick) -> None:
    """Process a message twice: the first attempt fails, the second goes on."""
    _, url, sink = order["place"]
    notes = os.open(order["journal"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if order["fault"] == "given before it is recorded":
        Journal.save = _hasty  # type: ignore[method-assign]
    worker = Worker(url, Path(sink), tick, lambda step: os.write(notes, f"{step} given\n".encode()) and None)
    id = order["pair"]
    with suppress(Stumbled):
        worker.process(id, is_awaited(id))
    worker.process(id, is_awaited(id))


def is_awaited(id: str) -> bool:
    """Every second victim lives on an event loop."""
    return int(id.removeprefix("p")) % 2 == 1


async def _hasty(self: Journal, colour: Any, name: str) -> None:
    """A bug: a step's result is given to the handler, and written with the attempt's next word."""


def main() -> None:
    """Carry out orders until there are none."""
    fork_victims(live)
