"""The orders of the examples: what the README says; orders, events and shipments through duplicates and ``kill -9``."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest
import redis
from tests.examples.running import Example, ExampleServer
from tests.integration.transaction_drivers import Place
from tests.servers.fixtures import HasURL

from effectonce.testing.clocks import wait_until

pytestmark = pytest.mark.timeout(300)

MORTAL_SHOP = """
import os, signal
from effectonce.outbox import _outbox

add = _outbox.Writer.add

def add_and_die(*args, **words):
    add(*args, **words)
    os.kill(os.getpid(), signal.SIGKILL)

_outbox.Writer.add = add_and_die
from shop import app
"""
"""The shop in a process that dies when order and event are written, and not committed."""
MORTAL_RELAY = """
import os, signal
import events

append = events.append

def append_and_die(event):
    append(event)
    os.kill(os.getpid(), signal.SIGKILL)

events.append = append_and_die
events.main()
"""
"""The relay in a process that dies when an event is published, before it has noted so."""


class Orders:
    """An example on a database and a broker, and what an auditor sees who asks these alone."""

    def __init__(self, example: Example, place: Place, broker: str = "") -> None:
        self.example, self.place, self.broker = example, place, broker
        self.environment = {"ORDERS_DATABASE": place.url} | ({"ORDERS_BROKER": broker} if broker else {})
        (example.folder / "mortal_shop.py").write_text(MORTAL_SHOP)
        (example.folder / "mortal_relay.py").write_text(MORTAL_RELAY)

    def run(self, command: str, status: int = 0) -> str:
        return self.example.run(command, status=status, **self.environment)

    def serve(self, app: str = "shop") -> ExampleServer:
        return self.example.serve(f"uvicorn {app}:app --port 8000", self.environment)

    def orders(self) -> list[tuple[Any, ...]]:
        return self.place.ask("SELECT number, reference, item, quantity FROM orders ORDER BY number")

    def waiting(self) -> int:
        return int(self.place.ask("SELECT count(*) FROM effectonce_outbox")[0][0])

    def events(self) -> list[tuple[str, int]]:
        """Ids and numbers of what was published, in its order."""
        if not self.broker:
            lines = (self.example.folder / "events.jsonl").read_text().splitlines()
            found = [json.loads(line) for line in lines if line]
            return [(event["id"], event["payload"]["order"]) for event in found]
        url, _, prefix = self.broker.replace("valkey://", "redis://").partition("?prefix=")
        with redis.Redis.from_url(url, decode_responses=True) as server:
            entries: Any = server.xrange(f"{prefix}orders")
        return [(fields["id"], json.loads(fields["payload"])["order"]) for _, fields in entries]

    def shipped(self, statement: str = "SELECT number FROM shipments ORDER BY number") -> list[Any]:
        with closing(sqlite3.connect(self.example.folder / "shipping.db")) as file:
            return file.execute(statement).fetchall()

    def audit(self, count: int) -> None:
        """Every order once, told of under one id, shipped once; the stock says the same."""
        orders = self.orders()
        numbers = [number for number, *_ in orders]
        assert len({reference for _, reference, *_ in orders}) == len(orders) == count
        assert sorted({number for _, number in self.events()}) == numbers
        assert len(set(self.events())) == count
        assert [number for (number,) in self.shipped()] == numbers
        for item, left in self.shipped("SELECT item, left FROM stock"):
            assert left == 100_000 - sum(quantity for *_, what, quantity in orders if what == item)


@pytest.fixture
def alone(tmp_path: Path) -> Orders:
    """With no server."""
    example = Example("orders", tmp_path)
    return Orders(example, Place("sqlite", f"sqlite:///{example.folder / 'shop.db'}"))


@pytest.fixture
def served(tmp_path: Path, postgres: HasURL, valkey: HasURL) -> Iterator[Orders]:
    """On PostgreSQL and Valkey."""
    name = f"orders_{uuid4().hex[:12]}"
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        place = Place("postgresql", f"{postgres.url.rpartition('/')[0]}/{name}")
        yield Orders(Example("orders", tmp_path), place, f"{valkey.url}?prefix={name}-")
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def order(server: ExampleServer, key: str, quantity: int = 1) -> httpx.Response:
    headers = {"X-Customer": "ada", "Idempotency-Key": key}
    return httpx.post(
        f"{server.url}/orders", json={"item": "chair", "quantity": quantity}, headers=headers, timeout=60
    )


def test_the_commands_of_the_readme(alone: Orders) -> None:
    """They run as they stand there, with no server: a hundred orders, processes that are killed, all is well."""
    install, storm = alone.example.commands
    alone.run(install)
    assert alone.run(storm).endswith("100 orders placed, 100 shipped. All is well.\n")
    alone.audit(100)


def test_the_storm_on_servers(served: Orders) -> None:
    """The same on PostgreSQL, with ``effectonce relay`` and Redis Streams."""
    assert served.run("python storm.py 60 6").endswith("60 orders placed, 60 shipped. All is well.\n")
    served.audit(60)
    assert served.waiting() == 0


def test_the_storm_would_tell(alone: Orders) -> None:
    """Take out what makes shop and shipping idempotent, and the same audit complains of both."""
    for file, right, wrong in (
        ("shop.py", "place(on, customer,", "place.__wrapped__(on, customer,"),
        ("shipping.py", "return retrying(transaction, body)", "with transaction() as on: ship(message, on)"),
    ):
        path = alone.example.folder / file
        assert path.read_text().count(right) == 1
        path.write_text(path.read_text().replace(right, wrong))
    said = alone.run("python storm.py 10 0", status=1)
    assert " is there 3 times" in said
    assert "an order was not shipped once" in said


def test_killed_before_the_commit(alone: Orders) -> None:
    """There is no order, and nobody hears of one; the next attempt places it at once, and every repeat is the same."""
    alone.run("python shop.py")
    with alone.serve("mortal_shop") as mortal, pytest.raises(httpx.TransportError):
        order(mortal, "o-1")
    assert (alone.orders(), alone.waiting()) == ([], 0)
    with alone.serve() as server:
        answers = [order(server, "o-1") for _ in range(3)]
        assert {(answer.status_code, answer.text) for answer in answers} == {(201, answers[0].text)}
        assert order(server, "o-1", quantity=2).status_code == 422
    assert (len(alone.orders()), alone.waiting()) == (1, 1)


def test_a_relay_killed_before_it_has_noted_what_it_published(alone: Orders) -> None:
    """The event is published twice, with one id, and shipped once."""
    alone.run("python shop.py")
    with alone.serve() as server:
        assert order(server, "o-1").status_code == 201
    alone.run("python mortal_relay.py", status=-9)
    assert (len(alone.events()), alone.waiting()) == (1, 1)
    with (
        alone.example.background("python events.py") as relay,
        alone.example.background("python shipping.py"),
    ):
        wait_until(lambda: alone.waiting() == 0)
        alone.run(
            "python -c 'import events, shipping; [shipping.receive(each) for each in events.published()]'"
        )
        assert relay.poll() is None
    assert len(alone.events()) == 2
    alone.audit(1)
