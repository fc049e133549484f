"""kill -9 on the whole way of an event: order and event are there together, published with one id, shipped once.

Every victim places orders in atomic mode, each with its event in the outbox, runs a relay, and consumes what that has
published. After its death an order is there if and only if its record and its event are. When all are dead: every order
is asked for again, a relay publishes what is left, and everything is delivered to the consumer twice. Then each order
is there once, its event was published at least once and under one id, and it was shipped once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from tests.crash.atomic_executioner import (
    ENGINES,
    FINAL,
    Executioner,
    kill_at_boundaries,
    kill_at_random,
    scene,
)
from tests.crash.atomic_victims import connect
from tests.crash.order_victims import Shop, ids_of, prepare
from tests.integration.transaction_drivers import Place

from effectonce import Message
from effectonce.testing.clocks import wait_until

MOMENTS = 12
"""Random points on every engine in an ordinary run."""
SOAK_MOMENTS = 600


class Auditor(Executioner):
    """Orders victims, examines what they leave behind, and at the end the whole."""

    victims = "order_victims"

    def __init__(self, place: Place, folder: Path) -> None:
        super().__init__(place, folder)
        self.shop = Shop(place, folder / "broker")
        self.names: list[str] = []

    def examine(self, name: str, answered: dict[str, str]) -> None:
        """Look first, then ask again: nobody has to wait for a dead one."""
        shop = self.shop
        self.names.append(name)
        with closing(connect(self.place)) as shop.connection:
            for id in ids_of(name):
                self.look(id, answered.get(id))
            assert shop.place_all(ids_of(name)) == ids_of(name)

    def look(self, id: str, answered: str | None) -> None:
        """One look at order, record and event, all of the same moment; the broker has what has left the outbox."""
        orders = f"SELECT count(*) FROM orders_{self.place.name} WHERE id = '{id}'"
        record = self.record_of(self.shop.receiver.key_of(Message(id=id)))
        events = f"SELECT count(*) FROM {self.shop.table} WHERE aggregate = '{id}'"
        order, state, waiting = self.shop.execute(f"SELECT ({orders}), ({record}), ({events})").fetchone()
        self.shop.connection.rollback()
        done = state is not None and int(state) in FINAL
        assert state is None or done, f"a claim can be seen that nobody committed: {state}"
        told = bool(waiting) or id in {order for _, order in self.shop.published()}
        assert (order, told) == (int(done), done), "order, record and event are apart"
        assert done or answered is None, "answered, but not recorded"

    def audit(self) -> None:
        """The whole, when all are dead."""
        shop, expected = self.shop, sorted(id for name in self.names for id in ids_of(name))
        wait_until(self.drained, what="a dead relay's lease")
        told = shop.published()
        with closing(connect(self.place)) as shop.connection:
            for event, order in [*told, *told]:
                shop.consume(event, order)
        assert self.all_of("orders") == expected, "an order is missing, or is there twice"
        assert sorted({order for _, order in told}) == expected, "an event was not published"
        assert len(set(told)) == len(expected), "an event was published under two ids"
        assert self.all_of("shipments") == expected, "an order was not shipped, or twice"

    def drained(self) -> bool:
        """Whether the outbox is empty, after one more relay."""
        self.shop.relay()
        return self.place.ask(f"SELECT count(*) FROM {self.shop.table}") == [(0,)]

    def all_of(self, table: str) -> list[str]:
        return [id for (id,) in self.place.ask(f"SELECT id FROM {table}_{self.place.name} ORDER BY id")]

    def close(self) -> None:
        self.shop.receiver.close()
        super().close()


@pytest.fixture(params=ENGINES)
def auditor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Auditor]:
    with scene(request, tmp_path_factory) as (place, folder):
        prepare(place)
        auditor = Auditor(place, folder)
        yield auditor
        auditor.close()
        tables = (f"orders_{place.name}", f"shipments_{place.name}", auditor.shop.table)
        place.ask(*(f"DROP TABLE {table}" for table in tables))


def test_killed_at_boundaries_and_moments(auditor: Auditor) -> None:
    """Of all statements, of shop, relay and consumer, every few; and while the engine is at work."""
    assert kill_at_boundaries(auditor.execute, every=3) >= 30
    kill_at_random(auditor.execute, Random(5), MOMENTS)
    auditor.audit()


def test_an_event_that_is_committed_first_is_found_out(auditor: Auditor) -> None:
    """The examiner can say no: who commits the event and then the order has, at some point, one without the other."""
    with pytest.raises(AssertionError, match="apart"):
        for at in range(1, 30):
            auditor.execute("statement", at, "the event apart")


def test_a_relay_that_forgets_is_found_out(auditor: Auditor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit can say no: an event that a relay takes for published, and the broker never had, is missed."""
    auditor.execute("statement", 1)
    monkeypatch.setattr(auditor.shop, "publish", lambda event: None)
    with pytest.raises(AssertionError, match="not published"):
        auditor.audit()


@pytest.mark.soak
def test_soak(auditor: Auditor) -> None:
    """Every boundary, and hundreds of moments on every engine."""
    random = Random(int(os.environ.get("EFFECTONCE_SEED", "0")))
    kill_at_boundaries(auditor.execute)
    kill_at_random(auditor.execute, random, SOAK_MOMENTS)
    auditor.audit()
