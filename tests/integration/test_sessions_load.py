"""Many clients with many requests, repeated and out of order: each happens once, and what is remembered stays small.

``./test --soak tests/integration/test_sessions_load.py -rP`` sends a million requests to each store. Then it shows what
requests cost of clients that have sent a thousand, beside those of new clients: in turns, since machines have moods.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import SOAK

from effectonce import Receiver
from effectonce._blocking import run
from effectonce.sessions import ClientSession, Request, Sessions

CLIENTS, REQUESTS = (1000, 1000) if SOAK else (20, 24)
BLOCK, WINDOW, AT_ONCE, DUPLICATES = 4, 8, 64, 0.2
ROUNDS = 15 if SOAK else 1


class Load:
    """Clients that send their requests in blocks, shuffled, one in five twice: at the same moment, or again."""

    def __init__(self, sessions: Sessions, clients: int, seed: int = 7) -> None:
        self.sessions, self.chance = sessions, random.Random(seed)
        self.clients = [ClientSession(sessions.open()) for _ in range(clients)]
        self.effects = {client.client: bytearray() for client in self.clients}
        self.sent = 0
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def effect(self, request: Request) -> int:
        self.effects[request.client][request.number - 1] += 1
        return request.number

    async def ask(self, request: Request) -> int | None:
        async with self._gate:
            self.sent += 1
            return (await self.sessions.aprocess(request, self.effect)).value

    async def block(self, client: ClientSession) -> None:
        requests = [client.begin() for _ in range(BLOCK)]
        self.effects[client.client] += bytes(BLOCK)
        self.chance.shuffle(requests)
        twice = [request for request in requests if self.chance.random() < DUPLICATES]
        now = [request for request in twice if self.chance.random() < 0.5]
        answers = await asyncio.gather(*map(self.ask, requests + now))
        answers += [await self.ask(client.again(request)) for request in twice if request not in now]
        later = [request for request in twice if request not in now]
        assert answers == [request.number for request in requests + now + later]
        for request in requests:
            client.done(request)

    async def round(self) -> float:
        """A block of every client; gives the seconds that each request took."""
        sent, started = self.sent, time.perf_counter()
        await asyncio.gather(*map(self.block, self.clients))
        return (time.perf_counter() - started) / (self.sent - sent)


@pytest.fixture(params=["sqlite", "valkey", "postgres"])
def receiver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Receiver]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/effects.db"
    else:
        url = f"{request.getfixturevalue(request.param).url}?timeout=60"
        if request.param == "postgres":
            url += "&table=session_load"
    with Receiver(url, breaker=None) as receiver:  # a crowded machine is slow, and not away
        yield receiver


@pytest.mark.timeout(7200)
def test_every_request_happens_once_and_little_is_remembered(
    receiver: Receiver, request: pytest.FixtureRequest
) -> None:
    """A fifth of them comes twice, and all in disorder; rows are bounded by clients and window."""
    sessions = Sessions(receiver, window=WINDOW)

    async def story() -> tuple[Load, Load, list[tuple[float, float]]]:
        old = Load(sessions, CLIENTS)
        for _ in range(REQUESTS // BLOCK):
            await old.round()
        new = Load(sessions, CLIENTS)
        return old, new, [(await new.round(), await old.round()) for _ in range(ROUNDS)]

    load, new, took = asyncio.run(story())
    assert all(effects == b"\1" * (REQUESTS + ROUNDS * BLOCK) for effects in load.effects.values())
    assert all(effects == b"\1" * (ROUNDS * BLOCK) for effects in new.effects.values())
    remembered = sum(
        run(sessions.receiver.store.get(key)) is not None
        for client in load.clients[:: max(CLIENTS // 20, 1)]
        for number in range(1, REQUESTS + ROUNDS * BLOCK + 1)
        for key in [
            sessions.call_of(Request(client.client, number, number - 1), b"", sessions.receiver.policy).key
        ]
    )
    assert remembered <= min(CLIENTS, 20) * WINDOW
    if "valkey" not in request.node.name and SOAK:
        assert run(sessions.receiver.store.stats()).keys <= 2 * CLIENTS * WINDOW
    first, last = (statistics.median(each) for each in zip(*took, strict=True))
    print(
        f"{load.sent} requests, {CLIENTS * (REQUESTS + ROUNDS * BLOCK)} effects, {remembered} remembered by "
        f"{min(CLIENTS, 20)} clients; in turns {first * 1e6:.0f} µs for each of a client's first requests, "
        f"{last * 1e6:.0f} µs for each after its first {REQUESTS}"
    )
    for client in load.clients + new.clients:
        sessions.end(client.client)
    sessions.close()
