"""The crew: a few threads do the steps of many callers, as many in one go as have queued up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from effectonce.errors import StoreUnavailable
from effectonce.stores._crew import Crew, awaited
from effectonce.testing.clocks import wait_until

WAIT_SECONDS = 20.0
THREADS = 2


class Server:
    """Answers each step with itself, ``bad`` ones with an error; while it is ``shut``, it makes its callers wait."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.open = threading.Event()
        self.open.set()

    def perform(self, steps: list[Any]) -> list[Any]:
        self.calls.append(steps)
        assert self.open.wait(WAIT_SECONDS)
        if "terrible" in steps:
            raise OSError("the line is dead")
        return [StoreUnavailable("bad") if step == "bad" else step for step in steps]


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def crew(server: Server) -> Iterator[Crew]:
    crew = Crew(server.perform, THREADS, lambda: 5)
    yield crew
    server.open.set()
    crew.close()


def occupied(server: Server, crew: Crew) -> list[Future[list[Any]]]:
    """Make every thread wait for the server, each with an order of its own."""
    server.open.clear()
    server.calls.clear()
    orders = []
    for number in range(THREADS):
        orders.append(crew.submit([f"first {number}"]))
        wait_until(lambda: len(server.calls) == len(orders))
    return orders


def test_replies_come_in_order(server: Server, crew: Crew) -> None:
    """Steps that don't fit into one go are done in several, and answered as one."""
    assert crew.submit(range(23)).result(WAIT_SECONDS) == list(range(23))
    assert max(len(call) for call in server.calls) == 5


def test_who_waits_goes_together(server: Server, crew: Crew) -> None:
    """While every thread is busy, callers queue up and share the next go."""
    first = occupied(server, crew)
    then = [crew.submit([number]) for number in range(5)]
    server.open.set()
    assert [order.result(WAIT_SECONDS) for order in then] == [[0], [1], [2], [3], [4]]
    assert [order.result(WAIT_SECONDS) for order in first] == [["first 0"], ["first 1"]]
    assert server.calls[THREADS:] == [[0, 1, 2, 3, 4]]


def test_an_error_is_its_own_callers(server: Server, crew: Crew) -> None:
    """One bad step fails the order it belongs to, and no other."""
    occupied(server, crew)
    good, bad, more = crew.submit(["good"]), crew.submit([1, "bad", 2]), crew.submit(["more"])
    server.open.set()
    with pytest.raises(StoreUnavailable):
        bad.result(WAIT_SECONDS)
    assert [good.result(WAIT_SECONDS), more.result(WAIT_SECONDS)] == [["good"], ["more"]]


def test_a_thread_survives_what_nobody_expected(crew: Crew) -> None:
    """What ``perform`` raises is told to those it was done for, and the next caller is served."""
    for _ in range(4):
        with pytest.raises(OSError, match="dead"):
            crew.submit(["terrible"]).result(WAIT_SECONDS)
    assert crew.submit(["fine"]).result(WAIT_SECONDS) == ["fine"]


def test_who_gives_up_is_not_served(server: Server, crew: Crew) -> None:
    """The steps of a cancelled order that have not been begun are dropped; a reply that comes late is, too."""
    begun, other = occupied(server, crew)
    waiting, staying = crew.submit(["waiting"]), crew.submit(["staying"])
    assert begun.cancel()
    assert waiting.cancel()
    server.open.set()
    assert [other.result(WAIT_SECONDS), staying.result(WAIT_SECONDS)] == [["first 1"], ["staying"]]
    with pytest.raises(CancelledError):
        begun.result(WAIT_SECONDS)
    assert not any("waiting" in call for call in server.calls)


def test_a_closed_crew_takes_nothing(crew: Crew) -> None:
    """Steps and errands are refused."""
    crew.submit(["before"]).result(WAIT_SECONDS)
    crew.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        crew.submit(["after"])
    with pytest.raises(StoreUnavailable, match="closed"):
        crew.run(lambda: None)


def test_on_an_event_loop(server: Server, crew: Crew) -> None:
    """Loops wait without being blocked: for replies, errors and errands; a cancelled task's steps are dropped."""

    async def use() -> None:
        assert await awaited(crew.submit([1, 2])) == [1, 2]
        assert await awaited(crew.run(lambda: "errand")) == "errand"
        with pytest.raises(StoreUnavailable):
            await awaited(crew.submit(["bad"]))
        occupied(server, crew)
        task = asyncio.ensure_future(awaited(crew.submit(["cancelled"])))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        server.open.set()
        assert await awaited(crew.submit(["after"])) == ["after"]

    asyncio.run(use())
    assert not any("cancelled" in call for call in server.calls)
