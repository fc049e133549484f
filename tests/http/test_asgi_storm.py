"""A storm: two server processes, one store, every key sent five times at once by clients that go away at random.

In the end each effect has happened once, and everyone who got an answer got the same one, byte for byte.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.http import servers
from tests.http.apps.extremes import STORE
from tests.http.servers import WebServer
from tests.http.world import World

TIMES = 5
AT_ONCE = 50
"""Keys under way at the same moment."""


class Answer(NamedTuple):
    """What a client that stayed has got."""

    status: bytes
    headers: tuple[bytes, ...]
    body: bytes
    replayed: bool


@pytest.fixture(params=["sqlite", "valkey"])
def storm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[World, list[WebServer]]]:
    """Two servers on one store, and the world that both act on."""
    world = World(tmp_path)
    store = f"sqlite:///{tmp_path}/shared.db"
    if request.param == "valkey":
        store = request.getfixturevalue("valkey").url
    with (
        servers.start("hostile-httptools", world, {STORE: store}) as one,
        servers.start("hostile-h11", world, {STORE: store}) as other,
    ):
        yield world, [one, other]
    world.close()


async def ask(port: int, request: bytes, patience: int | None) -> Answer | None:
    """Send a request and read its answer; or go away after so many bytes of the one or the other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if patience is not None and patience < len(request):
            writer.write(request[:patience])
            return None
        writer.write(request)
        if patience is not None:
            await reader.read(patience - len(request))
            return None
        head = await reader.readuntil(b"\r\n\r\n")
        status, *lines = head[:-4].split(b"\r\n")
        replayed = any(line.lower().startswith(b"x-idempotency-replayed") for line in lines)
        return Answer(status, remembered(lines), await read_chunks(reader), replayed)
    finally:
        writer.transport.abort()


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    """A body that comes in chunks, to its end."""
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return body


def remembered(lines: list[bytes]) -> tuple[bytes, ...]:
    """The header lines of an answer that every repeat has, in their order."""
    moment = (b"date:", b"server:", b"connection:", b"x-idempotency-replayed:")
    return tuple(line.lower() for line in lines if not line.lower().startswith(moment))


async def insist(key: str, ports: list[int], chance: random.Random) -> Answer:
    """One client: it may go away, but comes back with the same request until it has an answer."""
    body = b"5 EUR to " + key.encode()
    line = f'POST /storm/pay?n={key} HTTP/1.1\r\nHost: here\r\nIdempotency-Key: "{key}"\r\n'
    request = f"{line}Content-Length: {len(body)}\r\n\r\n".encode() + body
    while True:
        leaves = chance.random() < 0.4
        patience = chance.choice([chance.randrange(len(request) + 200), len(request)]) if leaves else None
        try:
            answer = await ask(chance.choice(ports), request, patience)
        except (ConnectionError, asyncio.IncompleteReadError):
            continue
        if answer is not None:
            return answer


async def rage(keys: list[str], ports: list[int], seed: int) -> dict[str, list[Answer]]:
    """Every key by five clients at once."""
    chance, slots = random.Random(seed), asyncio.Semaphore(AT_ONCE)

    async def one(key: str) -> list[Answer]:
        async with slots:
            return await asyncio.gather(*(insist(key, ports, chance) for _ in range(TIMES)))

    return dict(zip(keys, await asyncio.gather(*map(one, keys)), strict=True))


def check(storm: tuple[World, list[WebServer]], count: int, seed: int) -> None:
    """Let it rage, then count."""
    world, both = storm
    keys = [f"{both[0].port}-{seed}-{number}" for number in range(count)]
    answers = asyncio.run(rage(keys, [server.port for server in both], seed))
    assert {key: world.count(key) for key in keys} == dict.fromkeys(keys, 1)
    for key in keys:
        assert len({answer[:3] for answer in answers[key]}) == 1, key
        assert answers[key][0].status == b"HTTP/1.1 201 Created"
        assert sum(not answer.replayed for answer in answers[key]) <= 1, key


def test_a_thousand_keys_happen_once(storm: tuple[World, list[WebServer]]) -> None:
    """1,000 keys, five times each, in two processes."""
    check(storm, 1000, seed=0)


@pytest.mark.soak
def test_every_key_of_many_storms_happens_once(storm: tuple[World, list[WebServer]]) -> None:
    """20 storms, each with disconnects of its own."""
    for seed in range(1, 21):
        check(storm, 1000, seed)
