"""Client sessions in the user's transaction, over every driver: mark, answer and effect commit together or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from tests.integration.transaction_drivers import DRIVERS, Beside, Desk, Place, finished

from effectonce import Policy, Receiver
from effectonce._blocking import run
from effectonce.errors import SessionExpired, StaleRequest, UsageError
from effectonce.sessions import Request, Sessions

SOME = [
    "sqlite3", "psycopg", "psycopg-async", "asyncpg", "pymysql", "asyncmy", "session-psycopg",
    "sqlalchemy-async-aiosqlite", "async-session-asyncpg", "async-session-asyncmy",
]  # fmt: skip
"""Each driver and each way to use one: the others differ in nothing that sessions know of."""


class World:
    """A driver, its database, and sessions that are there."""

    def __init__(self, place: Place, kind: type[Desk]) -> None:
        self.place, self.kind = place, kind
        self.receiver = Receiver(place.store_url)
        self.sessions = Sessions(self.receiver)

    async def process(self, desk: Desk, request: Request, error: Exception | None = None) -> Any:
        """Process a request in a desk's transaction; its effect is a row."""

        async def charge(request: Request) -> int:
            await desk.effect(f"{request.client}:{request.number}")
            if error is not None:
                raise error
            return request.number

        sessions = self.sessions.on(desk.connection)
        if desk.awaits:
            return await sessions.aprocess(request, charge)
        return sessions.process(request, lambda request: finished(charge(request)))

    def effects(self, request: Request) -> int:
        return self.place.count(f"{request.client}:{request.number}")


@pytest.fixture(params=SOME)
def world(request: pytest.FixtureRequest, places: Callable[[str], Place]) -> Iterator[World]:
    dialect, kind = DRIVERS[request.param]
    world = World(places(dialect), kind)
    yield world
    world.sessions.close()
    world.receiver.close()


def told(story: Callable[[World, Desk], Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine, of either colour, with a desk."""

    async def tell(world: World) -> None:
        desk = world.kind(world.place)
        await desk.open()
        try:
            await story(world, desk)
        finally:
            await desk.close()

    def test(world: World) -> None:
        asyncio.run(tell(world))

    test.__name__, test.__doc__ = story.__name__, story.__doc__
    return test


@told
async def test_commit(world: World, desk: Desk) -> None:
    """After the commit everybody replays; the mark that came along is there too."""
    opened = world.sessions.open()
    request, following = Request(opened.client, 1), Request(opened.client, 2, 1)
    outcome = await world.process(desk, request)
    assert (outcome.value, outcome.replayed, outcome.guarantee) == (1, False, "atomic")
    await desk.commit()
    replayed = world.sessions.process(request, lambda request: 0)
    assert (replayed.value, replayed.replayed, replayed.guarantee) == (1, True, "atomic")
    assert (await world.process(desk, request)).replayed
    assert (await world.process(desk, following)).value == 2
    await desk.commit()
    assert world.sessions.touch(opened.client).acked == 1
    with pytest.raises(StaleRequest):
        await world.process(desk, request)
    await desk.rollback()
    assert world.effects(request) == world.effects(following) == 1


@told
async def test_rollback(world: World, desk: Desk) -> None:
    """Nothing is left of it, the mark has not moved, and the number runs."""
    opened = world.sessions.open()
    for number in (1, 2):
        world.sessions.process(Request(opened.client, number), lambda request: request.number)
    request = Request(opened.client, 3, 2)
    await world.process(desk, request)
    await desk.rollback()
    assert world.sessions.touch(opened.client).acked == 0
    assert world.sessions.process(Request(opened.client, 1), lambda request: 0).replayed
    assert world.effects(request) == 0
    assert not (await world.process(desk, request)).replayed
    await desk.commit()
    assert world.effects(request) == 1


@told
async def test_an_error_undoes_the_effect_and_releases_the_number(world: World, desk: Desk) -> None:
    """What remains is that it was tried, if the user commits that."""
    request = Request(world.sessions.open().client, 1)
    with pytest.raises(ValueError, match="down"):
        await world.process(desk, request, ValueError("down"))
    await desk.commit()
    assert world.effects(request) == 0
    assert (await world.process(desk, request)).attempt == 2
    await desk.commit()
    assert world.effects(request) == 1


@told
async def test_no_session_no_effect(world: World, desk: Desk) -> None:
    """One that is over, or never was, runs nothing."""
    opened = world.sessions.open()
    world.sessions.end(opened.client)
    for client in (opened.client, "0" * 32):
        with pytest.raises(SessionExpired):
            await world.process(desk, Request(client, 1))
        await desk.rollback()
        assert world.effects(Request(client, 1)) == 0


@told
async def test_a_concurrent_repeat_runs_nothing(world: World, desk: Desk) -> None:
    """It waits for the transaction that has the session, and replays."""
    if world.place.dialect == "sqlite":
        pytest.skip("one transaction at a time has the file")
    request = Request(world.sessions.open().client, 1)
    await world.process(desk, request)

    async def second() -> Any:
        other = world.kind(world.place)
        await other.open()
        try:
            outcome = await world.process(other, request)
            await other.commit()
            return outcome
        finally:
            await other.close()

    beside = Beside(second)
    world.place.wait_for_waiters()
    await desk.commit()
    assert beside.result().replayed
    assert world.effects(request) == 1


def test_sessions_elsewhere_are_refused(places: Callable[[str], Place]) -> None:
    """A connection to another kind of database can't hold them."""
    desk = DRIVERS["sqlite3"][1](places("sqlite"))
    run(desk.open())
    with Receiver("memory://", policy=Policy()) as receiver:
        sessions = Sessions(receiver)
        with pytest.raises(UsageError, match="same SQL database"):
            sessions.on(desk.connection)
    run(desk.close())
