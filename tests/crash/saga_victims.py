"""Victims of the sagas' crash tests: processes that run a saga, or a sweeper, and are killed at a point of their own.

A point is every moment before and after a command to the store, and before and after every effect. Run by
``test_sagas``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.crash.sink import SinkFile
from tests.crash.victims import Order, Tick, count_commands, fork_victims

from effectonce import NotApplied, Policy, Receiver, current
from effectonce.errors import Compensated, LeaseLost
from effectonce.saga import Saga, pivot, step, together
from effectonce.sweeper import Sweeper

LEASE = 1.5
QUICK = ("1ms", "2ms")
STEPS = ("reserve", "charge", "label", "ship", "mail")
SCENARIOS = ("completes", "refused", "shaky", "torn")
"""All goes well; the pivot says no; steps and compensations fail at first; a step happens, and then says it can't."""
SCHEMA = """
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS effects (key TEXT PRIMARY KEY, saga TEXT, name TEXT, fence INTEGER);
CREATE TABLE IF NOT EXISTS closed (saga TEXT, name TEXT, PRIMARY KEY (saga, name));
CREATE TABLE IF NOT EXISTS tries (saga TEXT, name TEXT, number INTEGER, PRIMARY KEY (saga, name));
"""


class Refused(Exception):
    """The provider says no."""


class Stale(Exception):
    """Behind a closed door, or with an old fence."""


class Sink(SinkFile):
    """The outside world: happens once for each derived key, checks fences, and has a barrier for every step."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, SCHEMA)

    def tried(self, saga: str, name: str) -> int:
        """How often something has been tried, this time included."""
        statement = "INSERT INTO tries VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET number = number + 1 RETURNING number"
        with self._lock:
            return int(self._connection.execute(statement, (saga, name)).fetchone()[0])

    def apply(self, saga: str, name: str) -> None:
        """Make an effect happen, unless it has."""
        attempt = current()
        key, fence = attempt.key_for("sink"), attempt.fence
        with self._lock, self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            self._apply(connection.execute, key, fence, saga, name)

    def _apply(self, execute: Callable[..., Any], key: str, fence: int, saga: str, name: str) -> None:
        role, _, step = name.partition(" ")
        known = execute("SELECT fence FROM effects WHERE key = ?", (key,)).fetchone()
        if known is not None:
            if fence < known[0]:
                raise Stale(name)
            execute("UPDATE effects SET fence = ? WHERE key = ?", (fence, key))
            return
        if (
            role == "do"
            and execute("SELECT 1 FROM closed WHERE saga = ? AND name = ?", (saga, step)).fetchone()
        ):
            raise Stale(f"{name} comes after its compensation")
        if role == "undo":
            execute("INSERT OR IGNORE INTO closed VALUES (?, ?)", (saga, step))
            if not execute(
                "SELECT 1 FROM effects WHERE saga = ? AND name = ?", (saga, f"do {step}")
            ).fetchone():
                return
        execute("INSERT INTO effects VALUES (?, ?, ?, ?)", (key, saga, name, fence))

    def effects(self) -> dict[str, list[str]]:
        """What has happened, by saga."""
        found: dict[str, list[str]] = {}
        for saga, name in self._connection.execute("SELECT saga, name FROM effects ORDER BY saga, name"):
            found.setdefault(saga, []).append(name)
        return found


class Process:
    """What every process has: a receiver on the shared store, the saga, a sweeper, and the sink."""

    def __init__(self, store: str, sink: Path, tick: Tick = lambda: None) -> None:
        self._tick, self.sink = tick, Sink(sink)
        self.receiver = Receiver(store, policy=Policy(lease=LEASE, busy="reject"), breaker=None)
        count_commands(self.receiver, tick)
        group = together(self._step("charge"), self._step("label"))
        self.saga = Saga(
            self.receiver,
            "fulfil",
            self._step("reserve"),
            group,
            pivot(self._function("do ship"), name="ship", refused=(Refused,), backoff=QUICK),
            step(self._function("do mail"), name="mail", backoff=QUICK),
        )
        self.sweeper = Sweeper(self.receiver, self.saga, every="20ms")

    def _step(self, name: str) -> Any:
        return step(self._function(f"do {name}"), self._function(f"undo {name}"), name=name, backoff=QUICK)

    def _function(self, name: str) -> Callable[[str], str]:
        def work(id: str) -> str:
            self._tick()
            scenario = id.partition("-")[0]
            if scenario != "completes" and name == "do ship":
                raise Refused(id)
            if scenario == "torn" and name == "do label":
                self._tear(id, name)
            is_shaky = scenario == "shaky" and name in ("do charge", "undo reserve")
            if is_shaky and self.sink.tried(id, name) < 3:
                raise ValueError("shaky")
            self.sink.apply(id, name)
            self._tick()
            return name

        return work

    def _tear(self, id: str, name: str) -> None:
        """The first try has its effect and no answer; whoever tries again hears that nothing was done, this time."""
        if self.sink.tried(id, name) > 1:
            raise NotApplied(id)
        self.sink.apply(id, name)
        self._tick()
        raise TimeoutError(id)

    def run(self, id: str, awaits: bool) -> None:
        """Run a saga as a client would."""
        outcome = asyncio.run(self.saga.aoutcome(id, id)) if awaits else self.saga.outcome(id, id)
        if outcome.error is not None and not isinstance(outcome.error, Compensated):
            raise outcome.error

    def close(self) -> None:
        self.receiver.close()
        self.sink.close()


def live(order: Order, tick: Tick) -> None:
    """Run one saga, or look once for what others have left behind."""
    process = Process(order["store"], Path(order["sink"]), tick)
    if order["id"] is None:
        process.sweeper.run_once()
    else:
        with suppress(LeaseLost):  # a machine that is busy may pause a victim for longer than its lease
            process.run(order["id"], order["awaits"])


def main() -> None:
    """Carry out orders until there are none."""
    fork_victims(live)
