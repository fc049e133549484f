"""Steps and transactions: a step that commits with its effect, and steps of a handler that is in one as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from tests.integration.transaction_drivers import DRIVERS, Desk, Place, finished
from tests.integration.transaction_worlds import World

from effectonce import Message, Outcome, Receiver, current
from effectonce.errors import StepMismatch, UsageError
from effectonce.steps import finished as finished_steps

CHOSEN = (
    "sqlite3",
    "psycopg",
    "psycopg-async",
    "asyncpg",
    "pymysql",
    "asyncmy",
    "session-psycopg",
    "django-sqlite",
)


class Stumbled(Exception):
    """The handler's own word that it failed."""


@pytest.fixture(params=CHOSEN)
def world(request: pytest.FixtureRequest, places: Callable[[str], Place]) -> Iterator[World]:
    dialect, kind = DRIVERS[request.param]
    world = World(places(dialect), kind)
    yield world
    world.receiver.close()


@pytest.fixture
def id() -> str:
    """A key of the test's own."""
    return uuid4().hex


async def step(
    desk: Desk, name: str, id: str, *, error: Exception | None = None, commits: bool = False, **choices: Any
) -> Any:
    """Ask for a step whose effect is a row, in the colour of a connection."""

    async def effect() -> str:
        await desk.effect(id)
        if error is not None:
            raise error
        if commits:
            await desk.commit()
        return f"{name} done"

    if desk.awaits:
        return await current().astep(name, effect, **choices)
    return current().step(name, lambda: finished(effect()), **choices)


async def process(desk: Desk, receiver: Receiver, id: str, body: Callable[[], Any]) -> Outcome[Any]:
    """Process a message with a handler that is a coroutine, in the colour of a connection."""
    if desk.awaits:
        return await receiver.aprocess(Message(id), lambda _: body())
    return receiver.process(Message(id), lambda _: finished(body()))


def test_a_step_commits_with_its_effect(world: World, id: str) -> None:
    """Before the commit there is neither, after it there are both: no later attempt runs the step again."""

    async def story() -> None:
        async with world.desk() as desk:

            async def body() -> Any:
                done = await step(desk, "reserve", id, on=desk.connection)
                await desk.commit()
                if current().number == 1:
                    raise Stumbled
                return done

            with pytest.raises(Stumbled):
                await process(desk, world.receiver, id, body)
            assert world.place.count(id) == 1
            assert (await process(desk, world.receiver, id, body)).value == "reserve done"
            assert world.place.count(id) == 1

    asyncio.run(story())


def test_a_step_is_rolled_back_with_its_effect(world: World, id: str) -> None:
    """A transaction that does not commit leaves nothing, so the next attempt runs the step, once."""

    async def story() -> None:
        async with world.desk() as desk:

            async def body() -> Any:
                done = await step(desk, "reserve", id, on=desk.connection)
                if current().number == 1:
                    await desk.rollback()
                    raise Stumbled
                await desk.commit()
                return done

            with pytest.raises(Stumbled):
                await process(desk, world.receiver, id, body)
            assert world.place.count(id) == 0
            assert (await process(desk, world.receiver, id, body)).value == "reserve done"
            assert world.place.count(id) == 1

    asyncio.run(story())


def test_a_transaction_that_was_rolled_back_is_tried_again_in_the_same_attempt(world: World, id: str) -> None:
    """Its step is asked for once more, and runs. When it is committed its name stands for it alone."""

    async def story() -> None:
        async with world.desk() as desk:

            async def body() -> Any:
                await step(desk, "reserve", id, on=desk.connection)
                await desk.rollback()
                done = await step(desk, "reserve", id, on=desk.connection)
                await desk.commit()
                with pytest.raises(UsageError, match="name of its own"):
                    await step(desk, "reserve", id, on=desk.connection)
                await desk.rollback()
                return done

            assert (await process(desk, world.receiver, id, body)).value == "reserve done"
            assert world.place.count(id) == 1

    asyncio.run(story())


def test_a_step_that_raises_is_undone_and_the_transaction_goes_on(world: World, id: str) -> None:
    """What it wrote is gone, and it may be asked for again in the same transaction."""

    async def story() -> None:
        async with world.desk() as desk:

            async def body() -> Any:
                with pytest.raises(Stumbled):
                    await step(desk, "reserve", f"{id}-bad", error=Stumbled(), on=desk.connection)
                done = await step(desk, "reserve", id, on=desk.connection)
                await desk.commit()
                return done

            assert (await process(desk, world.receiver, id, body)).value == "reserve done"
            assert (world.place.count(id), world.place.count(f"{id}-bad")) == (1, 0)

    asyncio.run(story())


def test_steps_in_and_out_of_transactions_mix(world: World, id: str) -> None:
    """Those outside are in the journal and in its order; the one in a transaction has a record of its own."""

    async def story() -> None:
        async with world.desk() as desk:

            async def body() -> Any:
                first = await step(desk, "plain", id, commits=True)
                second = await step(desk, "atomic", id, on=desk.connection)
                await desk.commit()
                third = await step(desk, "last", id, commits=True)
                if current().number == 1:
                    raise Stumbled
                return [first, second, third]

            with pytest.raises(Stumbled):
                await process(desk, world.receiver, id, body)
            record = world.receiver.get(world.receiver.key_of(Message(id)))
            assert record is not None
            assert list(finished_steps(record)) == ["plain", "last"]
            outcome = await process(desk, world.receiver, id, body)
            assert outcome.value == ["plain done", "atomic done", "last done"]
            assert world.place.count(id) == 3

    asyncio.run(story())


def test_steps_of_an_atomic_handler_are_in_its_transaction(world: World, id: str) -> None:
    """They run there, and come and go with it; names are checked, and nothing is sent or kept for them."""

    async def story() -> None:
        async with world.desk() as desk:

            async def body() -> Any:
                return [await step(desk, name, id) for name in ("one", "two")]

            async def twice() -> Any:
                return [await step(desk, name, id) for name in ("one", "one")]

            async def inside() -> Any:
                return await step(desk, "one", id, on=desk.connection)

            on = world.receiver.on(desk.connection)
            for wrong in (twice, inside):
                with pytest.raises(UsageError, match=r"asked for a step|has no place here"):
                    await process(desk, on, id, wrong)
                await desk.rollback()
            await process(desk, on, id, body)
            await desk.rollback()
            assert world.place.count(id) == 0
            outcome = await process(desk, on, id, body)
            await desk.commit()
            assert (outcome.value, outcome.guarantee) == (["one done", "two done"], "atomic")
            assert world.place.count(id) == 2

    asyncio.run(story())


def test_an_atomic_attempt_goes_on_where_another_was(world: World, id: str) -> None:
    """A journal that an attempt outside of a transaction has left is used inside, in its order; and it stays."""

    async def story() -> None:
        async with world.desk() as desk:

            def asks(*names: str, stumbles: bool = False) -> Callable[[], Any]:
                async def body() -> Any:
                    done = [await step(desk, name, f"{id}-{name}") for name in names]
                    if stumbles:
                        raise Stumbled
                    return done

                return body

            async def outside() -> Any:
                await step(desk, "one", f"{id}-one", commits=True)
                raise Stumbled

            with pytest.raises(Stumbled):
                await process(desk, world.receiver, id, outside)
            on = world.receiver.on(desk.connection)
            with pytest.raises(StepMismatch):
                await process(desk, on, id, asks("two"))
            await desk.commit()
            with pytest.raises(Stumbled):
                await process(desk, on, id, asks("one", "two", stumbles=True))
            await desk.commit()
            record = world.receiver.get(world.receiver.key_of(Message(id)))
            assert record is not None
            assert list(finished_steps(record)) == ["one"], "what was undone must not count as finished"
            assert (await process(desk, on, id, asks("one", "two"))).value == ["one done", "two done"]
            await desk.commit()
            assert [world.place.count(f"{id}-{name}") for name in ("one", "two")] == [1, 1]

    asyncio.run(story())
