"""The store under test, spoken to in plain calls, in either colour."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..._blocking import run
from ..._records import NOBODY, Claim, Completion, Decision, Ending, Record, Renewal, State, Verdict
from ...stores.base import Store, StoreStats
from ..clocks import ManualClock

T = TypeVar("T")

A, B, C = (letter * 16 for letter in (b"A", b"B", b"C"))
"""Owners: three attempts that know nothing of each other."""
ASKED, OTHER = b"asked" * 6, b"other" * 6
"""Fingerprints: what was asked, and something else."""
LONG = 3600.0
"""A lease or a retention that does not end while a test runs."""
GRANTED = (Verdict.CLAIMED, Verdict.TAKEN_OVER)

Job = Callable[[], Coroutine[Any, Any, T]]


class Driver(ABC):
    """Runs a store's coroutines as callers of one colour do."""

    @abstractmethod
    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run one to its end."""

    @abstractmethod
    def race(self, jobs: Sequence[Job[T]]) -> list[T]:
        """Run many at once, started together; results in order."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the driver holds."""


class BlockingDriver(Driver):
    """Callers without an event loop: many of them are many threads."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it on this thread."""
        return run(coroutine)

    def race(self, jobs: Sequence[Job[T]]) -> list[T]:
        """Run each on a thread of its own."""
        barrier = threading.Barrier(len(jobs))

        def one(job: Job[T]) -> T:
            barrier.wait()
            return run(job())

        with ThreadPoolExecutor(len(jobs)) as threads:
            return list(threads.map(one, jobs))

    def close(self) -> None:
        """There is nothing to give back."""


class AsyncioDriver(Driver):
    """Callers on an event loop: many of them are many tasks."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it on the loop."""
        return self._runner.run(coroutine)

    def race(self, jobs: Sequence[Job[T]]) -> list[T]:
        """Run each as a task of its own."""

        async def all_of_them() -> list[T]:
            return list(await asyncio.gather(*(job() for job in jobs)))

        return self._runner.run(all_of_them())

    def close(self) -> None:
        """Close the loop."""
        self._runner.close()


DRIVERS: dict[str, Callable[[], Driver]] = {"blocking": BlockingDriver, "asyncio": AsyncioDriver}


class Subject:
    """A store in one colour. The verbs are plain calls here, with what most tests don't care about filled in."""

    def __init__(self, store: Store, verbs: Store, clock: ManualClock, driver: Driver) -> None:
        self.store, self.verbs, self.clock, self.driver = store, verbs, clock, driver

    @property
    def has_manual_clock(self) -> bool:
        """Whether the store lives by the clock that the suite moves."""
        return self.now() == self.clock()

    def claim(
        self,
        key: str = "k",
        owner: bytes = A,
        fingerprint: bytes = ASKED,
        *,
        lease: float = LONG,
        keep: float = LONG,
        once: bool = False,
        max_attempts: int | None = None,
        may_create: bool = True,
    ) -> Decision:
        """Ask for a key."""
        command = Claim(key, owner, fingerprint, lease, keep, once, max_attempts, may_create)
        return self.driver.run(self.verbs.claim(command))

    def hold(self, key: str = "k", owner: bytes = A, fingerprint: bytes = ASKED, **choices: Any) -> Record:
        """Ask for a key that must be granted, and give the record that says so."""
        decision = self.claim(key, owner, fingerprint, **choices)
        assert decision.verdict in GRANTED
        assert decision.record is not None
        return decision.record

    def renew(
        self,
        held: Record,
        progress: bytes | None = None,
        *,
        owner: bytes | None = None,
        fence: int | None = None,
        lease: float = LONG,
    ) -> bool:
        """Renew a claim as its holder, or as who is named."""
        command = Renewal(held.key, _or(owner, held.owner), _or(fence, held.fence), lease, LONG, progress)
        return self.driver.run(self.verbs.renew(command))

    def complete(
        self,
        held: Record,
        result: bytes | None = b"done",
        state: State = State.COMPLETED,
        *,
        owner: bytes | None = None,
        fence: int | None = None,
        keep: float = LONG,
    ) -> Ending:
        """End a claim as its holder, or as who is named."""
        command = Completion(held.key, _or(owner, held.owner), _or(fence, held.fence), state, result, keep)
        return self.driver.run(self.verbs.complete(command))

    def doubt(self, held: Record, *, keep: float = LONG) -> Ending:
        """End a claim without knowing whether its effect happened."""
        return self.complete(held, None, State.IN_DOUBT, keep=keep)

    def settle(
        self, doubt: Record, state: State, result: bytes | None = None, *, keep: float = LONG
    ) -> Ending:
        """Say what became of a record in doubt: nobody holds it, so its fence is quoted."""
        return self.complete(doubt, result, state, owner=NOBODY, keep=keep)

    def release(self, held: Record, *, keep: float = LONG, began: bool = True) -> Ending:
        """Give a claim back."""
        return self.driver.run(self.verbs.release(held.key, held.owner, held.fence, keep, began))

    def get(self, key: str = "k") -> Record | None:
        """Read a record."""
        return self.driver.run(self.verbs.get(key))

    def read(self, key: str = "k") -> Record:
        """Read a record that must be there."""
        record = self.get(key)
        assert record is not None
        return record

    def purge(self, limit: int = 256) -> int:
        """Forget some of what has expired."""
        return self.driver.run(self.verbs.purge(limit))

    def scan(self, state: State | None = None, after: str = "", limit: int = 256) -> list[Record]:
        """Read many records."""
        return self.driver.run(self.verbs.scan(state, after, limit))

    def stats(self) -> StoreStats:
        """Count records."""
        return self.driver.run(self.verbs.stats())

    def now(self) -> float:
        """The store's clock."""
        return self.driver.run(self.verbs.now())

    def race(self, jobs: Sequence[Job[T]]) -> list[T]:
        """Run many commands at once; results in order."""
        return self.driver.race(jobs)


def _or(chosen: T | None, default: T) -> T:
    return default if chosen is None else chosen
