"""A driver, its database and a receiver whose records are there: what the stories of atomic mode are told of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
from tests.integration.transaction_drivers import DRIVERS, Desk, Place

from effectonce import Message, Policy, Receiver
from effectonce._records import State

ROTATING = " on a store that rotates"


class Declined(Exception):
    """An error that is a result."""


class World:
    """A driver, its database, and a receiver whose records are there."""

    def __init__(self, place: Place, kind: type[Desk]) -> None:
        self.place, self.kind = place, kind
        self.receiver = Receiver(place.store_url, policy=Policy(remember=(Declined,), lease="60s"))

    @asynccontextmanager
    async def desk(self) -> AsyncIterator[Desk]:
        """Another connection."""
        desk = self.kind(self.place)
        await desk.open()
        try:
            yield desk
        finally:
            await desk.close()

    def state(self, id: str) -> State | None:
        """What everybody sees of a message's record."""
        record = self.receiver.get(self.receiver.key_of(Message(id=id)))
        return None if record is None else record.state


W = TypeVar("W", bound=World)


def world_of(driver: str, places: Callable[..., Place], kind: type[W]) -> Iterator[W]:
    """The world of a driver, for a fixture."""
    dialect, desk = DRIVERS[driver.removesuffix(ROTATING)]
    world = kind(places(dialect, "&rotate=1h" if driver.endswith(ROTATING) else ""), desk)
    yield world
    world.receiver.close()


def told(story: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine, of either colour."""

    def test(world: World, request: pytest.FixtureRequest) -> None:
        asyncio.run(story(world, f"{request.node.name}"))

    test.__name__, test.__doc__ = story.__name__, story.__doc__
    return test
