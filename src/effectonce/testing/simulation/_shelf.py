"""The one real store of a simulated world, and the clock it believes in."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..._blocking import run
from ..._records import Record
from ...stores.memory import MemoryStore
from ._requests import Command


class Contents(NamedTuple):
    """What a MemoryStore holds."""

    records: tuple[Record, ...]
    floor: int
    wheel: tuple[tuple[int, tuple[str, ...]], ...]
    due: float


class StoreClock:
    """The store's clock. It knows who asks, so that a seeded bug can believe the asker's clock instead."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asker = 0

    def __call__(self) -> float:
        return self.now


class Shelf:
    """The one real store, filled with what a moment says it holds."""

    def __init__(self) -> None:
        self.clock = StoreClock()
        self.store = MemoryStore(clock=self.clock)

    def put(self, contents: Contents) -> None:
        """Fill the store."""
        store = self.store
        store._records = {record.key: record for record in contents.records}
        store._floor, store._due = contents.floor, contents.due
        store._wheel = {slot: list(keys) for slot, keys in contents.wheel}

    def take(self) -> Contents:
        """What the store holds now."""
        store = self.store
        wheel = tuple(sorted((slot, tuple(keys)) for slot, keys in store._wheel.items()))
        return Contents(tuple(sorted(store._records.values())), store._floor, wheel, store._due)

    def carry_out(
        self, command: Command
    ) -> tuple[Any, list[tuple[str, Any, Record | None, Record | None, Any]]]:
        """Do a command; give its reply, and each single step with the record before and after it."""
        verb, argument = command
        if verb in ("claim_many", "renew_many", "complete_many"):
            steps = [self._one(verb.removesuffix("_many"), item) for item in argument]
            return tuple(step[-1] for step in steps), steps
        if verb in ("claim", "complete"):
            step = self._one(verb, argument)
            return step[-1], [step]
        if verb == "purge":
            return self._purge(argument)
        if verb == "scan":
            return tuple(run(self.store.scan(*argument))), []
        return run(self.store.get(argument) if verb == "get" else self.store.now()), []

    def _one(self, verb: str, item: Any) -> tuple[str, Any, Record | None, Record | None, Any]:
        before = self.store._records.get(item.key)
        reply = run(getattr(self.store, verb)(item))
        return verb, item, before, self.store._records.get(item.key), reply

    def _purge(self, limit: int) -> tuple[Any, list[tuple[str, Any, Record | None, Record | None, Any]]]:
        before = dict(self.store._records)
        gone = run(self.store.purge(limit))
        after = self.store._records
        return gone, [("purge", None, record, after.get(key), gone) for key, record in before.items()]
