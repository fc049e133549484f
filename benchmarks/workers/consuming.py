"""Consumers with and without effectonce: messages are put into a broker, then it is timed how long these take.

The raw consumer does the same work without remembering anything: it reads up to a hundred messages, decodes them, calls
the handler for each, acknowledges them together. Where effectonce runs handlers side by side, so does the raw one: as
tasks on a loop, or on as many threads.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter, process_time
from typing import Any

from benchmarks.workers.base import Figure, Setup, Subject
from benchmarks.workers.consuming_brokers import BATCH, SOURCES, Source, bodies
from effectonce import Message, Receiver
from effectonce._blocking import run

SIDE_BY_SIDE = 16


def open_subject(setup: Setup, contender: str) -> Subject:
    """A consumer of effectonce, or a raw one."""
    broker, _, store = setup.url.partition(" ")
    source = SOURCES[setup.store](broker)
    drive: Any = asyncio.Runner().run if source.awaits else run
    drive(source.open())
    handlers = Handlers(store or broker, is_idle=setup.op.endswith("idle"))
    if contender == "raw":
        drive(source.subscribe())
        drain: Any = RawConsumer(source, handlers, is_crowd=setup.variant == "side by side").drain
    else:
        limit = 1 if setup.variant == "in turn" else SIDE_BY_SIDE
        drain = OurConsumer(source, handlers, Receiver(store or broker, consumer="bench"), limit).drain
    return Consuming(source, drive, drain, handlers)


class Consuming:
    """Fills a source, then times how long it takes to be empty."""

    def __init__(self, source: Source, drive: Any, drain: Any, handlers: Handlers) -> None:
        self._source, self._drive, self._drain, self._handlers = source, drive, drain, handlers

    def slice(self, operations: int) -> Figure:
        """Consume that many messages."""
        self._drive(self._source.fill(bodies(operations)))
        before = self._handlers.runs
        start, start_cpu = perf_counter(), process_time()
        self._drive(self._drain(operations))
        seconds, cpu = perf_counter() - start, process_time() - start_cpu
        ran = self._handlers.runs - before
        if ran != operations:
            raise AssertionError(f"the handler ran {ran} times where {operations} were due")
        return {"value": seconds / operations, "operations": operations, "cpu": cpu / operations}

    def close(self) -> None:
        """The worker ends with its connections."""


class Handlers:
    """What is to be done with a payload: nothing, or one write; and how often it was."""

    def __init__(self, url: str, *, is_idle: bool) -> None:
        import redis.asyncio

        self.runs = 0
        self.at_run: Callable[[], object] = lambda: None
        self._is_idle = is_idle
        self._client, self._aclient = redis.Redis.from_url(url), redis.asyncio.Redis.from_url(url)

    def handle(self, payload: Any) -> None:
        if not self._is_idle:
            self._client.set(f"done:{payload['order']}", "1", ex=60)
        self.runs += 1
        self.at_run()

    async def ahandle(self, payload: Any) -> None:
        if not self._is_idle:
            await self._aclient.set(f"done:{payload['order']}", "1", ex=60)
        self.runs += 1
        self.at_run()


class RawConsumer:
    """The least code that does the same."""

    def __init__(self, source: Source, handlers: Handlers, *, is_crowd: bool) -> None:
        self._source, self._handlers = source, handlers
        self._limit = SIDE_BY_SIDE if is_crowd else 1
        self._pool = ThreadPoolExecutor(SIDE_BY_SIDE)

    async def drain(self, count: int) -> None:
        """Consume that many messages."""
        source, work = self._source, self._acrowd if self._source.awaits else self._crowd
        while count > 0:
            messages = await source.read(BATCH)
            if messages:
                await work([json.loads(body) for _, body in messages])
                await source.acknowledge(messages)
                count -= len(messages)

    async def _crowd(self, payloads: list[Any]) -> None:
        if self._limit > 1:
            list(self._pool.map(self._handlers.handle, payloads))
            return
        for payload in payloads:
            self._handlers.handle(payload)

    async def _acrowd(self, payloads: list[Any]) -> None:
        if self._limit > 1:
            slots = asyncio.Semaphore(self._limit)

            async def one(payload: Any) -> None:
                async with slots:
                    await self._handlers.ahandle(payload)

            await asyncio.gather(*map(one, payloads))
            return
        for payload in payloads:
            await self._handlers.ahandle(payload)


class OurConsumer:
    """A consumer of effectonce whose connection stays open from slice to slice, as it does in use."""

    def __init__(self, source: Source, handlers: Handlers, receiver: Receiver, limit: int) -> None:
        self._handlers, self._awaits = handlers, source.awaits
        consumer = self._consumer = source.consumer(receiver, batch=BATCH, concurrency=limit)
        broker, opened = consumer._broker, False
        open_once = broker.open

        async def open_broker() -> None:
            nonlocal opened
            if not opened:
                opened = True
                await open_once()

        async def stay_open() -> None: ...

        broker.open, broker.close = open_broker, stay_open

    async def drain(self, count: int) -> None:
        """Consume that many messages."""
        consumer, handlers = self._consumer, self._handlers
        due = handlers.runs + count
        consumer._stopping.clear()
        handlers.at_run = lambda: handlers.runs == due and consumer.stop()

        def handler(message: Message) -> None:
            handlers.handle(message.payload)

        async def ahandler(message: Message) -> None:
            await handlers.ahandle(message.payload)

        if self._awaits:
            await consumer.arun(ahandler)
        else:
            consumer.run(handler)
