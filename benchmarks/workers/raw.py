"""The raw limit: the least work that still claims before the handler and completes after it."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterable
from importlib import import_module
from time import monotonic
from typing import Any

from benchmarks.workers.base import Counter, Run, Setup, Subject
from benchmarks.workers.forms import Forms, subject
from benchmarks.workers.micro import RAW_WORK, micro_stream
from benchmarks.workers.raw_sqlite import KEEP_SECONDS, LEASE_SECONDS, RawSqlite
from benchmarks.workers.timing import FileSize, stream
from benchmarks.workers.waiting import AsyncBody, Body, WaitInThreads, WaitOnLoop

PENDING, COMPLETED = 0, 1


def open_subject(setup: Setup) -> Subject:
    """Open one raw case."""
    if setup.op in ("relay", "publish"):
        return import_module("benchmarks.workers.relaying").open_subject(setup, "raw")  # type: ignore[no-any-return]
    if setup.op.startswith("consume"):
        return import_module("benchmarks.workers.consuming").open_subject(setup, "raw")  # type: ignore[no-any-return]
    if setup.url:
        return subject(setup, open_forms(setup))
    if setup.op == "micro":
        return micro_stream(setup, RAW_WORK[setup.variant])
    if setup.op == "wait":
        return (
            WaitOnLoop(_FutureMap().call) if setup.variant == "asyncio" else WaitInThreads(_EventMap().call)
        )
    counter = Counter()
    if setup.store == "memory":
        return stream(setup, _memory_run(counter), counter)
    raw = RawSqlite(setup, counter)
    if setup.op == "bytes":
        return FileSize(setup, raw.fill, raw.close)
    return stream(
        setup, raw.replay if setup.op == "dup" else raw.run, counter, fill=raw.fill, close=raw.close
    )


def open_forms(setup: Setup) -> Forms:
    """The raw client of a server, in `raw_<store>.py`. Only where there is one is its driver installed."""
    forms: Forms = import_module(f"benchmarks.workers.raw_{setup.store}").open_forms(setup)
    return forms


def _memory_run(counter: Counter) -> Run:
    """A dict under a lock: a claim that may answer, and a completion that only the owner may do."""
    records: dict[str, tuple[int, int, float, Any]] = {}
    lock = threading.Lock()
    owner_bits, handle = random.getrandbits, counter.handle

    def claim(key: str, owner: int) -> tuple[int, int, float, Any] | None:
        with lock:
            record = records.get(key)
            if record is not None:
                return record
            records[key] = (PENDING, owner, monotonic() + LEASE_SECONDS, None)
            return None

    def complete(key: str, owner: int, result: Any) -> bool:
        with lock:
            record = records.get(key)
            if record is None or record[0] != PENDING or record[1] != owner:
                return False
            records[key] = (COMPLETED, owner, monotonic() + KEEP_SECONDS, result)
            return True

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            owner = owner_bits(128)
            if claim(key, owner) is None:
                complete(key, owner, handle(key))

    return run


class _EventMap:
    """The least that lets a thread wait for another one's result."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, tuple[threading.Event, list[Any]]] = {}

    def call(self, key: str, body: Body) -> object:
        """Run, or wait for whoever runs."""
        with self._lock:
            known = self._running.get(key)
            if known is None:
                event, results = self._running[key] = (threading.Event(), [])
        if known is not None:
            known[0].wait()
            return known[1][0]
        results.append(body())
        event.set()
        return results[0]


class _FutureMap:
    """The same on one event loop."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Future[Any]] = {}

    async def call(self, key: str, body: AsyncBody) -> object:
        """Run, or wait for whoever runs."""
        known = self._running.get(key)
        if known is not None:
            return await known
        future = self._running[key] = asyncio.get_running_loop().create_future()
        future.set_result(await body())
        return future.result()
