"""Orders that customers place: ``python orders.py 20``. Each event is sent up to four times, as by a nervous sender."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import Any


def orders(count: int) -> Iterator[dict[str, Any]]:
    """The same orders on every run."""
    for number in range(count):
        yield {"order": f"o-{number}", "customer": f"c-{number % 7}", "cents": 500 + number}


def events(count: int) -> list[dict[str, Any]]:
    """Each order one to four times, repetitions near and far."""
    chance = random.Random(7)
    sent = [order for order in orders(count) for _ in range(chance.randint(1, 4))]
    chance.shuffle(sent)
    return sent


def main(count: int) -> None:
    """Send the events to Kafka."""
    from confluent_kafka import Producer
    from notify import KAFKA, TOPIC

    producer = Producer({"bootstrap.servers": KAFKA})
    for event in events(count):
        name = event["order"].encode()  # the event's id, which is the same however often it is sent
        producer.produce(TOPIC, json.dumps(event).encode(), key=name, headers=[("id", name)])
    producer.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
