"""idemkit: its function decorators over the in-memory backend. It has no SQLite backend."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from idemkit import InMemoryBackend, MethodConfig, idempotent, idempotent_sync

from benchmarks.workers.base import RESULT, Counter, Setup, Subject
from benchmarks.workers.startup import ImportTime
from benchmarks.workers.timing import stream
from benchmarks.workers.waiting import AsyncBody, Body, WaitInThreads, WaitOnLoop

DISTRIBUTION = "idemkit"


def open_subject(setup: Setup) -> Subject:
    """Open one case of idemkit."""
    if setup.op == "import":
        return ImportTime("idemkit")
    # The default of 10,000 records would refuse new keys in the middle of a run.
    backend = InMemoryBackend(max_size=10_000_000)
    # A constant scope is the cheapest one, and leaving it out warns.
    config = MethodConfig(key_fields=["order_id"], scope=lambda: "bench")
    if setup.op == "wait":
        return _waiting(setup, backend, config)
    counter = Counter()
    tick = counter.tick
    if setup.variant == "asyncio":
        # Its core is asyncio, so this is its fastest way: no hop to a background loop, none to a worker thread.
        @idempotent(backend=backend, config=config)
        async def acharge(order_id: str) -> dict[str, Any]:
            tick()
            return RESULT

        loop = asyncio.new_event_loop()

        async def arun(keys: Iterable[str]) -> None:
            for key in keys:
                await acharge(order_id=key)

        return stream(setup, lambda keys: loop.run_until_complete(arun(keys)), counter, close=loop.close)

    @idempotent_sync(backend=backend, config=config)
    def charge(order_id: str) -> dict[str, Any]:
        tick()
        return RESULT

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            charge(order_id=key)

    return stream(setup, run, counter)


def _waiting(setup: Setup, backend: Any, config: Any) -> Subject:
    """Waiting for the one in flight is its default."""
    if setup.variant == "asyncio":
        async_bodies: dict[str, AsyncBody] = {}

        @idempotent(backend=backend, config=config)
        async def acharge(order_id: str) -> dict[str, Any]:
            return await async_bodies[order_id]()

        async def acall(key: str, body: AsyncBody) -> object:
            async_bodies.setdefault(key, body)
            return await acharge(order_id=key)

        return WaitOnLoop(acall)
    bodies: dict[str, Body] = {}

    @idempotent_sync(backend=backend, config=config)
    def charge(order_id: str) -> dict[str, Any]:
        return bodies[order_id]()

    def call(key: str, body: Body) -> object:
        bodies.setdefault(key, body)
        return charge(order_id=key)

    return WaitInThreads(call)
