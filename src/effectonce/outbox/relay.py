"""The relay: takes events out of the outbox and hands them to a broker, at least once, in order per key.

One round: lease a batch, publish it, write back what became of each event. A relay that dies holds its events until the
lease ends; then another publishes them, with the same ids. Several relays share the work, because leased rows are
skipped and a write-back needs the token of its lease.

``run`` blocks; ``arun`` is for event loops, and does what blocks on a thread of its own. Both drive one body.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self, TypeVar

from .. import _service
from .._durations import Duration, seconds
from ..errors import StoreUnavailable, UsageError
from ._batch import Poison, Retrying, Sorting, waves
from ._database import Bell, Database, Lag, open_database, reason_of
from ._events import DeadEvent, Event, Publisher, Results, never_awaited
from ._table import DEFAULT
from .publishers import open_publisher

T = TypeVar("T")

SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 5.0
"""Between two looks at an outbox with nothing to do; it doubles from the one to the other."""
LEASE_SHARE = 0.7
"""Of a lease: when it is used up, what was not sent yet is given back."""
PURGE_ROWS, PURGE_SECONDS = 1000, 1.0

log = logging.getLogger("effectonce.outbox")


@dataclass
class Figures:
    """What a relay has done since it was made."""

    published: int = 0
    failed: int = 0
    """Attempts that the broker refused."""
    given_up: int = 0
    fenced: int = 0
    """Events that another relay took over before this one had written back."""
    purged: int = 0


class Relay(_service.Service["_Crew", int]):
    """Publishes what is in the outbox of a database: ``run`` until ``stop``; ``run_once`` tells how many events it did.

    database      its URL: postgresql://, mysql://, mariadb:// or sqlite:///
    publisher     a Publisher, a URL of a broker, or a callable that takes one Event and raises when it fails
    batch         how many events are leased at a time
    lease         how long another relay waits for this one, if it dies; a batch has to be published within it
    max_attempts  after so many an event is given up: a dead letter
    poison        what a dead letter with a key does: "block" holds up its key until a person decides; "skip" lets the
                  events after it pass
    retry         the first and the longest pause between attempts
    keep          how long published events stay in the table; by default they are deleted at once
    """

    def __init__(
        self,
        database: str,
        publisher: Publisher | Callable[[Event], object] | str,
        *,
        table: str = DEFAULT,
        batch: int = 1000,
        lease: Duration = "30s",
        max_attempts: int = 10,
        poison: Poison = "block",
        retry: tuple[Duration, Duration] = ("1s", "5m"),
        keep: Duration | None = None,
    ) -> None:
        if not 0 < batch <= 10_000 or max_attempts < 1:
            raise UsageError(f"batch={batch} must be 1 to 10000, and max_attempts={max_attempts} above zero.")
        if poison not in ("block", "skip"):
            raise UsageError(f'poison={poison!r} must be "block" or "skip".')
        self._database = open_database(database, table)
        self._another = partial(open_database, database, table)
        self._publisher = open_publisher(publisher)
        self._batch, self._lease, self._blocks = batch, seconds(lease, "lease"), poison == "block"
        first, longest = (seconds(pause, "retry") for pause in retry)
        self._retrying = Retrying(max_attempts, first, longest)
        self._keep = None if keep is None else seconds(keep, "keep")
        self.figures = Figures()
        self._bell, self._stopping = Bell(), threading.Event()
        self._purge_at = 0.0

    # What people call

    def stop(self) -> None:
        """Have ``run`` return after the batch that is under way. May be called in a signal handler."""
        self._stopping.set()
        self._bell.ring()

    def wake(self) -> None:
        """There is something to publish: look now, instead of when the pause is over."""
        self._bell.ring()

    def lag(self) -> Lag:
        """How many events wait, how long the oldest has, and how many were given up."""
        with self._aside() as database:
            return database.lag()

    def dead(self, limit: int = 100) -> list[DeadEvent]:
        """Events that were given up, oldest first, with the reason."""
        with self._aside() as database:
            return database.dead(limit)

    def replay(self, id: str | None = None) -> int:
        """Have a dead letter published after all; without an id, all of them. How many there were."""
        with self._aside() as database:
            replayed = database.replay(id)
        self.wake()
        return replayed

    def forget(self, id: str) -> bool:
        """Delete a dead letter. What it holds up goes on."""
        with self._aside() as database:
            return bool(database.forget(id))

    def _aside(self) -> closing[Database]:
        """A connection for one question: any thread may ask, while another is in the middle of a round."""
        return closing(self._another())

    def close(self) -> None:
        """Close the connections."""
        if not self._awaits():  # one of an event loop was closed on it
            self._publisher.close()
        self._database.close()
        self._bell.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The one body of both colours

    def _on_threads(self) -> _Crew:
        return _Here()

    def _on_loop(self) -> _Crew:
        return _Beside()

    async def _run(self, crew: _Crew) -> None:
        pause = SHORTEST_PAUSE
        while not self._stopping.is_set():
            try:
                taken, is_away = await self._round(crew)
                if not taken or is_away:
                    woken = await crew.call(self._database.wait, pause, self._bell)
                    pause = SHORTEST_PAUSE if woken and not is_away else min(pause * 2, LONGEST_PAUSE)
                else:
                    pause = SHORTEST_PAUSE
            except StoreUnavailable as error:
                log.warning("the outbox can't be reached: %s", error)
                await crew.call(self._bell.wait, pause)
                pause = min(pause * 2, LONGEST_PAUSE)
        await self._let_go()

    async def _run_once(self, crew: _Crew) -> int:
        before = self.figures.published
        taken, is_away = 1, False
        try:
            while taken and not is_away and not self._stopping.is_set():
                taken, is_away = await self._round(crew)
        finally:
            await self._let_go()
        return self.figures.published - before

    async def _round(self, crew: _Crew) -> tuple[int, bool]:
        """Publish one batch: how many events it had, and whether the broker was away."""
        token = secrets.randbits(62)
        asked_at = time.monotonic()
        events: list[Event] = await crew.call(self._database.claim, self._batch, self._lease, token)
        if not events:
            await self._purge(crew)
            return 0, False
        sorting = Sorting(self._retrying, random.random)
        await self._publish(crew, events, sorting, asked_at + self._lease * LEASE_SHARE)
        held = await crew.call(self._settle, token, sorting)
        self._tally(sorting, held)
        return len(events), sorting.away is not None

    async def _publish(self, crew: _Crew, events: list[Event], sorting: Sorting, deadline: float) -> None:
        """Hand events over, in waves."""
        groups = [events] if self._publisher.keeps_order else waves(events)
        for group in groups:
            going = sorting.may_go(group)
            if sorting.away or time.monotonic() >= deadline:
                sorting.untried(going)
                continue
            try:
                sorting.answered(going, await self._handed_over(crew, going, deadline))
            except Exception as error:  # every broker's driver has errors of its own
                sorting.untried(going, error)

    async def _handed_over(self, crew: _Crew, events: list[Event], deadline: float) -> Results:
        if not events:
            return ()
        publish: Any = self._publisher.publish
        results: Results
        if self._awaits():
            async with asyncio.timeout(deadline - time.monotonic()):
                results = await publish(events)
        else:
            results = await crew.call(publish, events)
        if inspect.isawaitable(results):
            raise never_awaited(results)
        if len(results) != len(events):
            raise UsageError(f"The publisher answered for {len(results)} of {len(events)} events.")
        return results

    def _settle(self, token: int, sorting: Sorting) -> int:
        return self._database.settle(
            token, sorting.settlement, blocks=self._blocks, keeps=self._keep is not None
        )

    def _tally(self, sorting: Sorting, held: int) -> None:
        settled, figures = sorting.settlement, self.figures
        figures.published += len(settled.published)
        figures.failed += len(sorting.failures)
        figures.given_up += len(settled.given_up)
        figures.fenced += len(settled) - held
        if held < len(settled):
            log.warning(
                "%d events were taken over by another relay: the lease is too short", len(settled) - held
            )
        if sorting.away is not None:
            log.warning("nothing can be published now: %s", reason_of(sorting.away))
        given_up = {seq for seq, _ in settled.given_up}
        for event, error in sorting.failures:
            word = "was given up" if event.seq in given_up else "failed"
            log.warning("event %s for %s %s: %s", event.id, event.topic, word, reason_of(error))

    async def _purge(self, crew: _Crew) -> None:
        """With nothing else to do, forget some of what was published long ago."""
        if self._keep is None or time.monotonic() < self._purge_at:
            return
        purged = await crew.call(self._database.purge, self._keep, PURGE_ROWS)
        self.figures.purged += purged
        self._purge_at = time.monotonic() + (0 if purged else PURGE_SECONDS)

    async def _let_go(self) -> None:
        """A publisher of an event loop can't outlive the loop."""
        if self._awaits():
            closing = self._publisher.close()
            if inspect.isawaitable(closing):
                await closing

    def _awaits(self) -> bool:
        return inspect.iscoroutinefunction(self._publisher.publish)


class _Crew(_service.Crew, Protocol):
    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Have something done that blocks."""
        ...


class _Here:
    """Callers without an event loop: what blocks may block."""

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        return function(*arguments)

    async def end(self) -> None:
        """Nobody was called for."""


class _Beside:
    """Callers on an event loop: what blocks does so on a thread beside it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="effectonce-relay")

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def end(self) -> None:
        self._thread.shutdown()


__all__ = ["Figures", "Relay"]
