"""idemkit: its function decorators, over its backends in memory, Redis, PostgreSQL and DynamoDB.

It has none on SQLite or MariaDB.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from idemkit import InMemoryBackend, MethodConfig, idempotent, idempotent_sync

from benchmarks.workers.base import RESULT, Counter, Setup, Subject
from benchmarks.workers.forms import Forms, subject
from benchmarks.workers.startup import ImportTime
from benchmarks.workers.waiting import AsyncBody, Body, WaitInThreads, WaitOnLoop

DISTRIBUTION = "idemkit"
# A constant scope is the cheapest one, and leaving it out warns.
CONFIG = MethodConfig(key_fields=["order_id"], scope=lambda: "bench")


def open_subject(setup: Setup) -> Subject:
    """Open one case of idemkit."""
    if setup.op == "import":
        return ImportTime("idemkit")
    if setup.op == "wait" and not setup.url:
        return _waiting(setup, _backend(setup))
    return subject(setup, open_forms(setup))


def open_forms(setup: Setup) -> Forms:
    """Its core is asyncio, so that is its fastest way: no hop to a background loop, none to a worker thread."""
    backend, counter = _backend(setup), Counter()
    tick = counter.tick

    @idempotent(backend=backend, config=CONFIG)
    async def acharge(order_id: str) -> dict[str, Any]:
        tick()
        return RESULT

    @idempotent_sync(backend=backend, config=CONFIG)
    def charge(order_id: str) -> dict[str, Any]:
        tick()
        return RESULT

    async def arun(keys: Iterable[str]) -> None:
        for key in keys:
            await acharge(order_id=key)

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            charge(order_id=key)

    return Forms(
        counter=counter,
        run=None if setup.variant == "asyncio" else run,
        arun=arun,
        call=_call(backend),
        aclose=getattr(backend, "aclose", None),
    )


def _backend(setup: Setup) -> Any:
    if setup.store == "redis":
        from idemkit import RedisBackend

        return RedisBackend.from_url(setup.url)
    if setup.store == "postgres":
        from idemkit import PostgresBackend
        from idemkit.backends.postgres import init_pg

        asyncio.run(init_pg(setup.url))
        return PostgresBackend.from_url(setup.url, max_size=16)
    if setup.store == "dynamodb":
        from idemkit import DynamoBackend

        from benchmarks.workers.dynamodb_table import address_of, table_of

        return DynamoBackend(table=table_of(setup.url), **address_of(setup.url))
    # The default of 10,000 records would refuse new keys in the middle of a run.
    return InMemoryBackend(max_size=10_000_000)


def _waiting(setup: Setup, backend: Any) -> Subject:
    """Waiting for the one in flight is its default."""
    if setup.variant == "asyncio":
        async_bodies: dict[str, AsyncBody] = {}

        @idempotent(backend=backend, config=CONFIG)
        async def acharge(order_id: str) -> dict[str, Any]:
            return await async_bodies[order_id]()

        async def acall(key: str, body: AsyncBody) -> object:
            async_bodies.setdefault(key, body)
            return await acharge(order_id=key)

        return WaitOnLoop(acall)
    return WaitInThreads(_call(backend))


def _call(backend: Any) -> Callable[[str, Body], object]:
    bodies: dict[str, Body] = {}

    @idempotent_sync(backend=backend, config=CONFIG)
    def charge(order_id: str) -> dict[str, Any]:
        return bodies[order_id]()

    def call(key: str, body: Body) -> object:
        bodies.setdefault(key, body)
        return charge(order_id=key)

    return call
