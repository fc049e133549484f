"""Clocks that stand still, both embedded stores, both colours, and a receiver on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.receiving import COLOURS, Colour, Told, by_hand
from tests.unit.shops import Shop

from effectonce import Receiver
from effectonce.stores.base import Store
from effectonce.stores.memory import MemoryStore
from effectonce.stores.sqlite import SQLiteStore
from effectonce.testing.clocks import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    """The only clock there is: the store's, the wall's and the local monotonic one."""
    return ManualClock()


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    """Each embedded store in turn."""
    kinds = {
        "memory": lambda: MemoryStore(clock=clock),
        "sqlite": lambda: SQLiteStore(tmp_path / "effects.db", durability="off", clock=clock),
    }
    with kinds[request.param]() as store:
        yield store


@pytest.fixture(params=COLOURS, ids=lambda colour: colour.name)
def colour(request: pytest.FixtureRequest) -> Colour:
    """Each colour in turn."""
    chosen: Colour = request.param
    return chosen


@pytest.fixture
def told() -> Told:
    """A hook that keeps what it is told."""
    return Told()


@pytest.fixture
def receiver(store: Store, clock: ManualClock, told: Told) -> Iterator[Receiver]:
    """A receiver for which time moves by hand."""
    with by_hand(Receiver(store, clock=clock, monotonic=clock, hooks=[told])) as receiver:
        yield receiver


@pytest.fixture
def make_shop(tmp_path: Path) -> Iterator[Callable[[bool], Shop]]:
    """Makes a database for consumers in atomic mode, of either colour."""
    shops: list[Shop] = []

    def make(awaits: bool) -> Shop:
        shops.append(Shop(tmp_path, awaits))
        return shops[0]

    yield make
    for shop in shops:
        shop.receiver.close()
