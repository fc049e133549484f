"""exactly-once: the decorator keyed on the order, as its README shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from exactly_once import Store, once, wait

from benchmarks.workers.base import RESULT, Counter, Setup, Subject
from benchmarks.workers.forms import Forms, subject
from benchmarks.workers.raw_sqlite import KEEP_SECONDS
from benchmarks.workers.startup import ImportTime
from benchmarks.workers.timing import FileSize, stream
from benchmarks.workers.waiting import AsyncBody, Body, WaitInThreads, WaitOnLoop

DISTRIBUTION = "exactly-once"


def open_subject(setup: Setup) -> Subject:
    """Open one case of exactly-once."""
    if setup.op == "import":
        return ImportTime("exactly_once")
    if setup.url:
        return subject(setup, open_forms(setup))
    store = Store.memory() if setup.store == "memory" else Store.sqlite(str(setup.file()))
    if setup.op == "wait":
        return _waiting(setup, store)
    if setup.variant == "full":
        # Its store is fixed at synchronous=NORMAL, which may lose acknowledged commits when the power fails.
        # Set to FULL from outside, so that both sides of the comparison promise the same.
        store._conn.execute("PRAGMA synchronous = FULL")
    counter = Counter()
    tick = counter.tick

    @once(store, key=lambda order_id: order_id)
    def charge(order_id: str) -> dict[str, Any]:
        tick()
        return RESULT

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            charge(key)

    # The memory store has nothing to close.
    close = getattr(store, "close", lambda: None)
    return FileSize(setup, run, close) if setup.op == "bytes" else stream(setup, run, counter, close=close)


def open_forms(setup: Setup) -> Forms:
    """Its stores on servers."""
    store = (
        Store.redis(setup.url, committed_ttl=int(KEEP_SECONDS))
        if setup.store == "redis"
        else Store.postgres(setup.url)
    )
    counter = Counter()
    tick = counter.tick

    @once(store, key=lambda order_id: order_id)
    def charge(order_id: str) -> dict[str, Any]:
        tick()
        return RESULT

    @once(store, key=lambda order_id: order_id)
    async def acharge(order_id: str) -> dict[str, Any]:
        tick()
        return RESULT

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            charge(key)

    async def arun(keys: Iterable[str]) -> None:
        for key in keys:
            await acharge(key)

    return Forms(
        counter=counter,
        run=run,
        arun=arun,
        call=_call(store),
        close=store.close,
        # Many callers that come first at the same moment would each open a connection, and leave all but one open.
        aopen=lambda: acharge("first"),
        aclose=store.aclose,
    )


def _waiting(setup: Setup, store: Any) -> Subject:
    """A duplicate waits with `policy=wait()`, at its default interval."""
    if setup.variant == "asyncio":
        async_bodies: dict[str, AsyncBody] = {}

        @once(store, key=lambda order_id: order_id, policy=wait())
        async def acharge(order_id: str) -> dict[str, Any]:
            return await async_bodies[order_id]()

        async def acall(key: str, body: AsyncBody) -> object:
            async_bodies.setdefault(key, body)
            return await acharge(key)

        return WaitOnLoop(acall)
    return WaitInThreads(_call(store))


def _call(store: Any) -> Callable[[str, Body], object]:
    bodies: dict[str, Body] = {}

    @once(store, key=lambda order_id: order_id, policy=wait())
    def charge(order_id: str) -> dict[str, Any]:
        return bodies[order_id]()

    def call(key: str, body: Body) -> object:
        bodies.setdefault(key, body)
        return charge(key)

    return call
