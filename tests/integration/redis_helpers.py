"""What the tests of the Redis store share."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from effectonce._blocking import run
from effectonce._records import Claim, Completion, Record, Renewal, State
from effectonce.keys import new_owner
from effectonce.stores import Store

LONG = 3600.0
COLOURS = pytest.mark.parametrize("colour", ["blocking", "asyncio"])


def claim_of(key: str, **changes: Any) -> Claim:
    return Claim(key, new_owner(), b"asked" * 3 + b"!", LONG, LONG)._replace(**changes)


def ending_of(held: Record, result: bytes | None = b"done", **changes: Any) -> Completion:
    return Completion(held.key, held.owner, held.fence, State.COMPLETED, result, LONG)._replace(**changes)


def renewal_of(held: Record) -> Renewal:
    return Renewal(held.key, held.owner, held.fence, LONG, LONG)


def in_colour(colour: str, store: Store, verb: Callable[[Store], Any]) -> Any:
    """Have a verb done for a blocking caller, or on an event loop of its own."""
    if colour == "blocking":
        return run(verb(store.for_blocking()))

    async def awaited(answer: Awaitable[Any]) -> Any:
        return await answer

    return asyncio.run(awaited(verb(store.for_asyncio())))


def hold(store: Store, key: str, **changes: Any) -> Record:
    """Claim a key that is free."""
    record = run(store.claim(claim_of(key, **changes))).record
    assert record is not None
    return record


def hold_and_look(store: Store, key: str) -> bool:
    """Claim a free key and see that each answer was one's own: what was granted is what is there."""
    return run(store.get(key)) is None and hold(store, key) == run(store.get(key))


@contextmanager
def clients(url: str) -> Iterator[list[redis.Redis]]:
    """A plain client of every server behind a URL, to look behind the store."""
    plain = re.sub(r"^(redis|valkey)(s?)(\+cluster)?://", r"redis\2://", url)
    found = [redis.Redis.from_url(plain)]
    if "+cluster" in url:
        (seed,) = found
        addresses = sorted(seed.execute_command("CLUSTER NODES"))
        seed.close()
        found = [redis.Redis(*address.partition("@")[0].rsplit(":", 1)) for address in addresses]
    try:
        yield found
    finally:
        for client in found:
            client.close()


def forget(url: str, prefix: str) -> None:
    """Remove the keys with a prefix."""
    with clients(url) as servers:
        for server in servers:
            pipeline = server.pipeline(transaction=False)
            for name in server.scan_iter(f"{prefix}*", count=1000):
                pipeline.unlink(name)
            pipeline.execute()
