"""What the endpoints of every contender do, whatever framework serves them.

A handler causes an effect in the world outside, which counts it and may hold it, and then answers. What is asked for
is the last part of the path; the name of the effect is the query's ``n``.
"""

from __future__ import annotations

import json
import os
from typing import NamedTuple

from tests.http.world import effect

STORE, LEASE, KEEP = "PEERS_STORE", "PEERS_LEASE", "PEERS_KEEP"
STREAMED = [b"%01000d" % number for number in range(20)]
LARGE = 3 << 19
"""One and a half MiB."""


class Meal(NamedTuple):
    """An answer."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


def cook(what: str, name: str, asked: bytes) -> Meal:
    """Cause the effect, and say so."""
    count = effect(name)
    said = json.dumps({"name": name, "count": count}, separators=(",", ":")).encode()
    kind = ("content-type", "application/json")
    if what == "nothing":
        return Meal(204, [], b"")
    if what == "elsewhere":
        return Meal(303, [("location", f"/receipts/{count}")], b"")
    if what == "flaky" and count == 1:
        return Meal(500, [kind], b'{"error":"out of order"}')
    if what == "parts":
        return Meal(201, [kind, ("x-part", "one"), ("x-part", "two")], said)
    if what == "large":
        return Meal(201, [kind], b'"' + b"x" * (LARGE - 2) + b'"')
    return Meal(201, [kind], said)


def store() -> str:
    """The URL of the Redis database that is this contender's alone."""
    return os.environ[STORE]


def lease() -> float:
    """For how long a claim holds without renewal, where a contender can be told."""
    return float(os.environ[LEASE])


def keep() -> float:
    """For how long an answer is remembered."""
    return float(os.environ[KEEP])
