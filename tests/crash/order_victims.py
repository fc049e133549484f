"""Victims on the whole way of an event: an order and its event in one transaction, a relay, an idempotent consumer.

They are forked and killed as those of ``atomic_victims``, at the boundaries of every statement of all three parts, and
before and after an event is handed to the broker. The broker is a file: what was written to it stays.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.crash.atomic_victims import connect, counted
from tests.crash.victims import Order, Tick, fork_victims
from tests.integration.transaction_drivers import Place

from effectonce import Message, Receiver
from effectonce.outbox import Event, Outbox, Relay

LEASE = "1s"
"""How long the events of a killed relay wait for another."""


class Shop:
    """Orders with their events, the relay that publishes these, and who ships once for each of them."""

    connection: Any

    def __init__(self, place: Place, broker: Path, fault: str = "") -> None:
        self.place, self.broker, self.fault = place, broker, fault
        self.table = f"outbox_{place.name}"
        self.outbox = Outbox(self.table)
        self.receiver = Receiver(place.store_url)

    def execute(self, sql: str) -> Any:
        cursor = self.connection.cursor()
        cursor.execute(sql)
        return cursor

    def order(self, message: Message) -> str:
        """Place an order and add its event."""
        self.execute(f"INSERT INTO orders_{self.place.name} VALUES ('{message.id}')")
        if self.fault != "the event apart":
            self.tell(message.id)
        return message.id

    def tell(self, id: str) -> None:
        self.outbox.on(self.connection).add("orders", {"order": id}, key=id)

    def place_one(self, id: str) -> str:
        """An order in a transaction of its own."""
        if self.fault == "the event apart":
            self.tell(id)
            self.connection.commit()
        outcome = self.receiver.on(self.connection).process(Message(id=id), self.order)
        self.connection.commit()
        return str(outcome.value)

    def place_all(self, ids: list[str]) -> list[str]:
        """Several in one transaction."""
        messages = [Message(id=id) for id in ids]
        outcomes = self.receiver.on(self.connection).process_batch(messages, self.order)
        self.connection.commit()
        return [str(outcome.value) for outcome in outcomes]

    def publish(self, event: Event) -> None:
        """Hand an event to the broker."""
        line = json.dumps([event.id, json.loads(event.payload)["order"]])
        with self.broker.open("ab", buffering=0) as file:
            file.write(f"{line}\n".encode())

    def relay(self, tick: Tick | None = None) -> None:
        """Publish what is there."""

        def publish(event: Event) -> None:
            if tick:
                tick()
            self.publish(event)
            if tick:
                tick()

        with Relay(self.place.url, publish, table=self.table, lease=LEASE) as relay:
            if tick:
                count_statements(relay, tick)
            relay.run_once()

    def published(self) -> list[tuple[str, str]]:
        """Ids and orders, as often as they were published."""
        if not self.broker.exists():
            return []
        return [tuple(json.loads(line)) for line in self.broker.read_text().splitlines()]

    def consume(self, event: str, order: str) -> None:
        """Ship an order when its event comes for the first time."""

        def ship(message: Message) -> str:
            self.execute(f"INSERT INTO shipments_{self.place.name} VALUES ('{order}')")
            return order

        self.receiver.on(self.connection).process(Message(id=event, payload=order, source="orders"), ship)
        self.connection.commit()


def count_statements(relay: Relay, tick: Tick) -> None:
    """Have the statements of a relay counted, too."""
    database: Any = relay._database
    if hasattr(database, "connected"):
        counted(database.connected(), tick)
    else:
        with database._speaking() as connection:
            counted(connection, tick)


def ids_of(name: str) -> list[str]:
    """All orders of one victim."""
    return [f"{name}-one", f"{name}-b1", f"{name}-b2"]


def prepare(place: Place) -> None:
    """The tables of orders and shipments, and the outbox."""
    from effectonce.ops.cli import main

    place.ask(
        f"CREATE TABLE orders_{place.name} (id VARCHAR(40) NOT NULL)",
        f"CREATE TABLE shipments_{place.name} (id VARCHAR(40) NOT NULL)",
    )
    assert main(["migrate", "--outbox", "--table", f"outbox_{place.name}", place.url]) == 0


def live(order: Order, tick: Tick) -> None:
    """An order, two in one transaction, the relay, and the consumer; answers are noted when they are given."""
    journal = Path(order["journal"])
    shop = Shop(Place(*order["place"]), journal.parent / "broker", order["fault"])
    shop.connection = connect(shop.place, tick)
    noted = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    one, *batch = ids_of(order["pair"])
    answers = [shop.place_one(one), *shop.place_all(batch)]
    os.write(noted, "".join(f"{id} {id}\n" for id in answers).encode())
    shop.relay(tick)
    for event, id in shop.published():
        if id.startswith(f"{order['pair']}-"):
            shop.consume(event, id)


def main() -> None:
    """Carry out orders until there are none."""
    fork_victims(live)
