"""The barrier between an action and its compensation, in users' transactions and over the receiver's own store.

Whoever comes first, however often, and both at once: nothing happens twice, and the books balance.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.integration.transaction_drivers import Place

from effectonce import LeaseLost, Policy, Receiver
from effectonce.errors import AlreadyUndone, UsageError
from effectonce.saga import Barrier, Compensated, Saga, barrier, step
from effectonce.stores.memory import MemoryStore
from effectonce.testing.clocks import ManualClock
from effectonce.transactions import retrying


class Crash(BaseException):
    """Ends a process where it is."""


class Books:
    """Accounts in a database, beside the records: what an action books, its compensation books back."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.receiver = Receiver(place.store_url, policy=Policy(lease="60s"))

    @contextmanager
    def begin(self) -> Iterator[Any]:
        connection: Any
        if self.place.dialect == "sqlite":
            connection = sqlite3.connect(self.place.path, timeout=30)
        elif self.place.dialect == "postgresql":
            import psycopg

            connection = psycopg.connect(self.place.url)
        else:
            import pymysql

            connection = pymysql.connect(**self.place.mysql())
        with closing(connection):
            yield connection
            connection.commit()

    def book(self, connection: Any, line: str) -> str:
        connection.cursor().execute(f"INSERT INTO {self.place.effects} VALUES ('{line}')")
        return line

    def act(self, id: str) -> str:
        """The action, in a transaction of its own."""

        def body(connection: Any) -> str:
            return Barrier(self.receiver.on(connection), id).act(self.book, connection, f"+{id}")

        return retrying(self.begin, body)

    def undo(self, id: str) -> str | None:
        """Its compensation, likewise."""

        def body(connection: Any) -> str | None:
            return Barrier(self.receiver.on(connection), id).undo(self.book, connection, f"-{id}")

        return retrying(self.begin, body)

    def lines(self, id: str) -> list[str]:
        rows = self.place.ask(f"SELECT id FROM {self.place.effects}")
        return sorted(line for (line,) in rows if line[1:] == id)


class Memory:
    """The same without transactions: doors in the receiver's own store, effects outside of it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.receiver = Receiver(
            MemoryStore(clock=self.clock), policy=Policy(lease="60s"), monotonic=self.clock
        )
        self.receiver._keeper.wake_at = float("-inf")
        self.booked: list[str] = []

    def book(self, line: str) -> str:
        self.booked.append(line)
        return line

    def act(self, id: str) -> str:
        return Barrier(self.receiver, id).act(self.book, f"+{id}")

    def undo(self, id: str) -> str | None:
        return Barrier(self.receiver, id).undo(self.book, f"-{id}")

    def lines(self, id: str) -> list[str]:
        return sorted(line for line in self.booked if line[1:] == id)


class Loop(Memory):
    """The same on an event loop."""

    async def _book(self, line: str) -> str:
        return self.book(line)

    def act(self, id: str) -> str:
        return str(asyncio.run(Barrier(self.receiver, id).aact(self._book, f"+{id}")))

    def undo(self, id: str) -> str | None:
        undone: str | None = asyncio.run(Barrier(self.receiver, id).aundo(self._book, f"-{id}"))
        return undone


Desk = Books | Memory
PLACES = {"sqlite": "sqlite", "postgres": "postgresql", "mariadb": "mysql"}


@contextmanager
def opened(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Books]:
    url = f"sqlite:///{tmp_path / 'app.db'}" if kind == "sqlite" else request.getfixturevalue(kind).url
    place = Place(PLACES[kind], url)
    place.prepare()
    books = Books(place)
    try:
        yield books
    finally:
        books.receiver.close()
        place.remove()


@pytest.fixture(params=PLACES)
def books(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Books]:
    with opened(request.param, request, tmp_path) as books:
        yield books


@pytest.fixture(params=["memory", "loop", *PLACES])
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Desk]:
    if request.param in PLACES:
        with opened(request.param, request, tmp_path) as books:
            yield books
    else:
        memory = Memory() if request.param == "memory" else Loop()
        yield memory
        memory.receiver._keeper.close()


def test_action_then_compensation(desk: Desk) -> None:
    """The usual order, and repeats of both: one booking each, and the same answers."""
    assert [desk.act("a"), desk.act("a")] == ["+a", "+a"]
    assert [desk.undo("a"), desk.undo("a")] == ["-a", "-a"]
    # A late repeat of what happened before it was undone: its answer, and nothing more.
    assert desk.act("a") == "+a"
    assert desk.lines("a") == ["+a", "-a"]


def test_compensation_before_action(desk: Desk) -> None:
    """It is recorded and does nothing; the action that comes after it is refused, however often it comes."""
    assert [desk.undo("a"), desk.undo("a")] == [None, None]
    for _ in range(2):
        with pytest.raises(AlreadyUndone):
            desk.act("a")
    assert desk.undo("a") is None
    assert desk.lines("a") == []


def test_both_at_once(desk: Desk) -> None:
    """Each four times at the same moment: booked and booked back, or neither."""
    random = Random(7)
    ids = [f"r{number}" for number in range(8)]
    calls: list[Callable[[], Any]] = [
        lambda id=id, call=call: call(id)  # type: ignore[misc]
        for id in ids
        for call in (desk.act, desk.undo) * 2
    ]
    random.shuffle(calls)

    def attempt(call: Callable[[], Any]) -> None:
        with suppress(AlreadyUndone):
            call()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(attempt, calls))
    for id in ids:
        assert desk.lines(id) in ([f"+{id}", f"-{id}"], [])


def test_an_action_that_raised_in_its_transaction_did_nothing(books: Books) -> None:
    """It was rolled back with its booking, also when the user commits the rest: there is nothing to undo."""

    def fail(connection: Any) -> str:
        books.book(connection, "+a")
        raise ValueError("late")

    with books.begin() as connection, pytest.raises(ValueError, match="late"):
        Barrier(books.receiver.on(connection), "a").act(fail, connection)
    assert books.undo("a") is None
    assert books.lines("a") == []


def test_a_compensation_waits_for_an_action_that_is_not_committed(books: Books) -> None:
    """It can't tell yet whether there is something to undo; when the action commits, there is."""
    undone: list[Any] = []
    with books.begin() as connection:
        Barrier(books.receiver.on(connection), "a").act(books.book, connection, "+a")
        beside = threading.Thread(target=lambda: undone.append(books.undo("a")))
        beside.start()
        books.place.wait_for_waiters()
        assert undone == []
    beside.join(30)
    assert undone == ["-a"]
    assert books.lines("a") == ["+a", "-a"]


# Over the receiver's own store


def test_a_half_open_door_may_hide_an_effect() -> None:
    """The action's process died in the middle: its compensation runs, once, and the action never does again."""
    desk = Memory()

    def die(line: str) -> str:
        desk.book(line)
        raise Crash

    with pytest.raises(Crash):
        Barrier(desk.receiver, "a").act(die, "+a")
    desk.clock.advance(61)
    assert [desk.undo("a"), desk.undo("a")] == ["-a", "-a"]
    with pytest.raises(AlreadyUndone):
        desk.act("a")
    assert desk.lines("a") == ["+a", "-a"]


def test_a_compensation_that_died_behind_the_door_is_gone_on_with() -> None:
    """The door is closed, the compensation is not done: a repeat knows that it has to be."""
    desk = Memory()

    def die(line: str) -> str:
        raise Crash

    for call in (
        lambda: Barrier(desk.receiver, "a").act(die, ""),
        lambda: Barrier(desk.receiver, "a").undo(die, ""),
    ):
        with pytest.raises(Crash):
            call()
        desk.clock.advance(61)
    assert desk.undo("a") == "-a"


def test_a_late_worker_is_fenced_by_its_own_door() -> None:
    """It comes to its end after the compensation: its result is refused, so that its saga never counts on it."""
    desk = Memory()

    def slow(line: str) -> str:
        desk.clock.advance(61)
        assert desk.undo("a") == "-a"
        return desk.book(line)

    with pytest.raises((LeaseLost, AlreadyUndone)):
        Barrier(desk.receiver, "a").act(slow, "+a")


# In a saga


def test_a_barrier_outside_of_a_saga_needs_a_name() -> None:
    """Said at once."""
    desk = Memory()
    with pytest.raises(UsageError, match=r"Barrier\(receiver, id\)"):
        barrier(desk.receiver)


def test_a_late_action_meets_its_successors_compensation(books: Books) -> None:
    """A worker is paused before its booking; another takes over and undoes the saga; the first wakes up: no booking."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    ended: list[Any] = []

    def reserve(order: str) -> str:
        clock.advance(61)
        ended.append(successor.outcome("o-1", order).error)
        return retrying(
            books.begin, lambda on: barrier(books.receiver.on(on)).act(books.book, on, f"+{order}")
        )

    def fail(order: str) -> None:
        raise ValueError("no")

    def release(order: str) -> None:
        retrying(books.begin, lambda on: barrier(books.receiver.on(on)).undo(books.book, on, f"-{order}"))

    def process(first: Callable[[str], Any]) -> Saga:
        receiver = Receiver(store, policy=Policy(lease="60s"), clock=clock, monotonic=clock)
        receiver._keeper.wake_at = float("-inf")
        return Saga(receiver, "s", step(first, release, name="reserve", attempts=1))

    successor = process(fail)
    late = process(reserve).outcome("o-1", "a")
    assert isinstance(ended[0], Compensated)
    assert isinstance(late.error, Compensated | LeaseLost)
    assert books.lines("a") == []
