"""Atomic mode, interrupted: at every statement, over every driver, effect and record are both there or both not."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
from tests.integration.transaction_drivers import DRIVERS, OWN, REJECT, Asyncpg, Desk, Place

from effectonce import Message, Policy, Receiver
from effectonce._records import State

CALLS = (
    "execute", "execute_all", "talk", "savepoint", "release", "move_on", "roll_back_to", "begin", "commit",
)  # fmt: skip
"""What an adapter has done by its driver."""


class Interrupt(BaseException):
    """As Ctrl-C, but nobody knows of it."""


class TimeLimit(Exception):
    """As some task queues raise it, from a signal."""


class Interruption:
    """Comes once, at the ``at``-th call of a driver: before it, after it, or in the midst of it."""

    def __init__(self, kind: type[BaseException], when: str, at: int) -> None:
        self.kind, self.when, self.at = kind, when, at
        self.calls, self.has_come = 0, False

    def lurk(self, adapter: Any) -> None:
        for name in CALLS:
            setattr(adapter, name, self._around(getattr(adapter, name)))

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        async def interrupted(*args: Any) -> Any:
            comes, self.calls = self.calls == self.at, self.calls + 1
            self.has_come = self.has_come or comes
            if comes and self.when == "before":
                raise self.kind("interrupted")
            task = asyncio.current_task()
            if comes and self.when == "during" and task is not None:
                task.cancel()
            done = await call(*args)
            if comes and self.when == "after":
                raise self.kind("interrupted")
            return done

        return interrupted


CANCELLED = asyncio.CancelledError
KINDS: dict[bool, list[tuple[type[BaseException], str]]] = {
    False: [(Interrupt, "before"), (Interrupt, "after"), (TimeLimit, "before"), (TimeLimit, "after")],
    True: [(CANCELLED, "before"), (CANCELLED, "after"), (CANCELLED, "during")],
}
"""By whether a driver is awaited."""


class World:
    """A driver, its database, and a receiver whose records are there."""

    def __init__(self, place: Place, kind: type[Desk]) -> None:
        self.place, self.kind = place, kind
        self.receiver = Receiver(place.store_url, policy=Policy(lease="60s"))

    @property
    def interruptions(self) -> list[tuple[type[BaseException], str]]:
        return KINDS[self.kind.awaits]

    def state(self, id: str) -> State | None:
        record = self.receiver.get(self.receiver.key_of(Message(id=id)))
        return None if record is None else record.state

    async def interrupted(
        self, ids: list[str], interruption: Interruption, commit: bool = False, **options: Any
    ) -> None:
        """Process messages in a transaction, are interrupted, and commit all the same."""
        desk = self.kind(self.place)
        await desk.open()
        if commit and isinstance(desk, Asyncpg):  # which has begun
            await desk.transaction.rollback()
        try:
            with suppress(Interrupt, TimeLimit, asyncio.CancelledError):
                await self._process(desk, ids, interruption, commit, **options)
            task = asyncio.current_task()
            while task is not None and task.cancelling():
                task.uncancel()
            with suppress(Exception):  # what was closed can't be committed
                await desk.commit()
        finally:
            with suppress(Exception):
                await desk.close()

    async def _process(
        self, desk: Desk, ids: list[str], interruption: Interruption, commit: bool, **options: Any
    ) -> None:
        on: Any = self.receiver.on(desk.connection, commit=commit)
        interruption.lurk(on.store.adapter)
        messages = [Message(id=id, payload={"id": id}) for id in ids]
        if len(messages) > 1 and desk.awaits:
            await on.aprocess_batch(messages, desk.handler(), **options)
        elif len(messages) > 1:
            on.process_batch(messages, desk.handler(), **options)
        elif desk.awaits:
            await on.aprocess(messages[0], desk.handler(), **options)
        else:
            on.process(messages[0], desk.handler(), **options)


LEAKS = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""A session that is cancelled while aiosqlite connects leaves that connection to the collector, whoever uses it, and
since Python 3.13 it is told so."""
LEAKY = "async-session-aiosqlite"


def _param(driver: str) -> Any:
    return pytest.param(driver, marks=LEAKS) if driver == LEAKY else driver


@pytest.fixture(params=list(map(_param, DRIVERS)))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    dialect, kind = DRIVERS[request.param]
    if dialect == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('atomic') / 'app.db'}"
    else:
        url = request.getfixturevalue("postgres" if dialect == "postgresql" else "mariadb").url
    place = Place(dialect, url)
    place.prepare()
    world = World(place, kind)
    yield world
    world.receiver.close()
    place.remove()
    if request.param == LEAKY:
        gc.collect()  # here, where it is expected, and not in a test that comes later


def story(world: World, size: int, **options: Any) -> None:
    async def told() -> None:
        for kind, when in world.interruptions:
            for at in count():
                ids = [f"{kind.__name__}-{when}-{at}-{number}" for number in range(size)]
                interruption = Interruption(kind, when, at)
                await world.interrupted(ids, interruption, **options)
                for id in ids:
                    told = (world.place.count(id), world.state(id))
                    assert told in ((1, State.COMPLETED), (0, State.ABSENT), (0, None)), id
                if not interruption.has_come:
                    assert [world.place.count(id) for id in ids] == [1] * size
                    break

    asyncio.run(told())


def test_a_call(world: World) -> None:
    """Whatever interrupts a call, and wherever, who then commits has committed the effect with its record, or neither;
    and the key is free for who comes next.
    """
    story(world, 1)


def test_a_call_that_does_not_wait(world: World) -> None:
    """The same with busy="reject", whose claim takes a few statements more."""
    story(world, 1, policy=REJECT)


def test_a_batch(world: World) -> None:
    """The same of every message in a batch."""
    story(world, 3)


owning = pytest.mark.parametrize("world", OWN, indirect=True)


@owning
def test_a_call_that_is_a_transaction(world: World) -> None:
    """The same with commit=True, where BEGIN and COMMIT may be interrupted too."""
    story(world, 1, commit=True)


@owning
def test_a_call_that_is_a_transaction_and_does_not_wait(world: World) -> None:
    """The same with busy="reject"."""
    story(world, 1, commit=True, policy=REJECT)


@owning
def test_a_batch_that_is_a_transaction(world: World) -> None:
    """The same of every message in a batch."""
    story(world, 3, commit=True)
