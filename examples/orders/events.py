"""How events travel from the shop to shipping: through a Redis Stream, or, with no server at all, through a file.

With Redis the relay is ``effectonce relay DATABASE BROKER``. Without, it is ``python events.py``: any function that
takes an event and raises when it fails is a publisher. Either way an event may come twice, with the same id.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import redis

from effectonce import Message
from effectonce.outbox import Event, Relay

BROKER = os.environ.get("ORDERS_BROKER", "events.jsonl")
IS_REDIS = BROKER.startswith(("redis:", "rediss:", "valkey:"))
STREAM = parse_qs(urlsplit(BROKER).query).get("prefix", [""])[0] + "orders"
"""The stream of the topic "orders": the relay puts the prefix of its URL before it."""
LOOK_SECONDS = 0.05


def client() -> redis.Redis:
    """A client of the server that BROKER names."""
    return redis.Redis.from_url(BROKER.partition("?")[0].replace("valkey:", "redis:", 1))


def append(event: Event) -> None:
    """Publish to the file. It is there when this returns; what a crash may have torn before it ends with the line."""
    line = json.dumps({"id": event.id, "payload": json.loads(event.payload)})
    with Path(BROKER).open("ab") as file:
        file.write(f"\n{line}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def follow() -> Iterator[Message]:
    """The events of the file from its beginning, and those that come, for ever."""
    Path(BROKER).touch()
    with Path(BROKER).open("rb") as file:
        rest = b""
        while True:
            *lines, rest = (rest + file.read()).split(b"\n")
            yield from _read(lines)
            time.sleep(LOOK_SECONDS)


def published() -> list[Message]:
    """All events that were ever published."""
    if not IS_REDIS:
        return list(_read(Path(BROKER).read_bytes().split(b"\n")))
    with client() as server:
        entries = server.xrange(STREAM)
    return [
        Message(fields[b"id"].decode(), json.loads(fields[b"payload"]), source=STREAM)
        for _, fields in entries
    ]


def _read(lines: list[bytes]) -> Iterator[Message]:
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:  # empty, or torn: such an event has not been confirmed, and comes again
            continue
        yield Message(event["id"], event["payload"], source=STREAM)


def main() -> None:
    """The relay of those who have no server."""
    from shop import DATABASE

    with Relay(DATABASE, append, lease="2s") as relay:
        relay.run()


if __name__ == "__main__":
    main()
