"""The same without Kafka, in one process: every event reaches every channel, and everybody is told once."""

from __future__ import annotations

import os
from functools import partial

import channels
import sinks
from orders import events

from effectonce import Message, Receiver, current

ORDERS = 20
DONE = ("executed", "replayed")


def main() -> None:
    """Notify, and count."""
    smtp_port, http_port = sinks.serve(0, 0)
    channels.SMTP_PORT, channels.SINKS = smtp_port, f"http://127.0.0.1:{http_port}"
    messages = [Message(event["order"], event, source="orders") for event in events(ORDERS)]
    store = os.environ.get("EFFECTONCE_STORE", "memory://")
    for channel in channels.CHANNELS:
        sent, left = 0, messages
        with Receiver(store, consumer=channel) as receiver:
            while left:  # what fails comes again, as a broker would have it
                outcomes = receiver.process_batch(left, partial(notify, channel))
                sent += sum(outcome.status == "executed" for outcome in outcomes)
                left = [
                    message
                    for message, outcome in zip(left, outcomes, strict=True)
                    if outcome.status not in DONE
                ]
        kept = sinks.BOXES[channel].counts()["kept"]
        print(f"{channel:6}{len(messages):4} events, {sent:3} sent, {kept:3} kept by the other side")


def notify(channel: str, message: Message) -> None:
    """Tell a customer, with a key that is the same on every attempt."""
    channels.CHANNELS[channel](message.payload, current().key_for(channel))


if __name__ == "__main__":
    main()
