"""One channel's consumer: ``python notify.py email``. Start as many as you like; kill any of them."""

from __future__ import annotations

import os
import signal
import sys

from channels import CHANNELS

from effectonce import Message, Policy, Receiver, current
from effectonce.messaging import kafka

TOPIC = os.environ.get("TOPIC", "orders")
KAFKA = os.environ.get("KAFKA", "localhost:9092")
STORE = os.environ.get("EFFECTONCE_STORE", "sqlite:///effects.db")


def consumer_of(channel: str, receiver: Receiver) -> kafka.Consumer:
    """A group for each channel: each hears of all orders, and none waits for another."""
    send = CHANNELS[channel]
    # Six seconds is the least that a broker takes by default: so a consumer that was killed is missed soon.
    settings = {"bootstrap.servers": KAFKA, "group.id": f"notify-{channel}", "session.timeout.ms": 6000}
    consumer = kafka.Consumer(settings, TOPIC, receiver=receiver, batch=10)

    @consumer.handler
    def notify(message: Message) -> None:
        # The same key on every attempt: who dies after this line sends it again, and the other side knows it.
        send(message.payload, current().key_for(channel))

    return consumer


def main(channel: str) -> None:
    """Consume until SIGTERM."""
    policy = Policy(lease="5s", max_attempts=10)
    with Receiver(STORE, consumer=channel, policy=policy) as receiver:
        consumer = consumer_of(channel, receiver)
        signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
        consumer.run()


if __name__ == "__main__":
    main(sys.argv[1])
