"""What the tests of the Redis store share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import redis


@contextmanager
def clients(url: str) -> Iterator[list[redis.Redis]]:
    """A plain client of every server behind a URL, to look behind the store."""
    plain = re.sub(r"^(redis|valkey)(s?)(\+cluster)?://", r"redis\2://", url)
    seed = redis.Redis.from_url(plain)
    found = [seed]
    if "+cluster" in url:
        addresses = {(host, int(port)) for host, port in _primaries(seed)}
        seed.close()
        found = [redis.Redis(host, port) for host, port in sorted(addresses)]
    try:
        yield found
    finally:
        for client in found:
            client.close()


def _primaries(seed: redis.Redis) -> list[tuple[str, str]]:
    lines = seed.execute_command("CLUSTER NODES")
    nodes = lines.values() if isinstance(lines, dict) else []
    assert nodes, lines
    return [tuple(address.split("@")[0].rsplit(":", 1)) for address in lines]  # type: ignore[misc]


def forget(url: str, prefix: str) -> None:
    """Remove the keys with a prefix."""
    with clients(url) as servers:
        for server in servers:
            names = list(server.scan_iter(f"{prefix}*", count=1000))
            for at in range(0, len(names), 100):
                pipeline = server.pipeline(transaction=False)
                for name in names[at : at + 100]:
                    pipeline.unlink(name)
                pipeline.execute()
