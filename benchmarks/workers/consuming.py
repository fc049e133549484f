"""Consumers with and without effectonce: messages are put into a broker, then it is timed how long these take.

The raw consumer does the same work without remembering anything: it reads up to a hundred messages, decodes them, calls
the handler for each, acknowledges them together. Where effectonce runs handlers side by side, so does the raw one: as
tasks on a loop, or on as many threads. In atomic mode a batch is one transaction, of the raw consumer too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext
from time import perf_counter, process_time
from typing import Any, NamedTuple

from benchmarks.workers.base import Figure, Setup, Subject
from benchmarks.workers.consuming_brokers import BATCH, SOURCES, Source, bodies
from effectonce import Message, Receiver
from effectonce._blocking import run

SIDE_BY_SIDE = 16


def open_subject(setup: Setup, contender: str) -> Subject:
    """A consumer of effectonce, or a raw one."""
    urls = [url for url in setup.url.split(" ") if not url.startswith("postgresql")]
    database = next((url for url in setup.url.split(" ") if url.startswith("postgresql")), "")
    broker, store = urls[0], urls[-1]
    source = SOURCES[setup.store](broker)
    drive: Any = asyncio.Runner().run if source.awaits else run
    drive(source.open())
    work = drive(work_of(setup.op.rpartition("-")[2], store, database, source.awaits))
    handlers = Handlers(work.write)
    if contender == "raw":
        drive(source.subscribe())
        is_crowd = setup.variant == "side by side"
        drain: Any = RawConsumer(source, handlers, work.begin, is_crowd=is_crowd).drain
    else:
        receiver = Receiver(store if work.begin is None else database, consumer="bench")
        options = options_of(setup.variant, work.begin, receiver)
        drain = OurConsumer(source, handlers, receiver, **options).drain
    return Consuming(source, drive, drain, handlers)


def options_of(variant: str, begin: Begin | None, receiver: Receiver) -> dict[str, Any]:
    """What a consumer of effectonce is told."""
    if begin is None:
        return {"concurrency": 1 if variant == "in turn" else SIDE_BY_SIDE}
    receiver.get("nothing")  # makes the table
    return {"concurrency": 1, "transaction": begin} | ({"cursor": True} if variant == "cursor" else {})


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


Write = Callable[[str], Any]
Begin = Callable[[], Any]


class Work(NamedTuple):
    """What a handler does for an order, and what begins the transaction that it does so in, where there is one."""

    write: Write | None = None
    begin: Begin | None = None


async def work_of(kind: str, store: str, database: str, awaits: bool) -> Work:
    """Nothing, one key in Redis, or one row in PostgreSQL: committed by itself, or in a transaction with others."""
    if kind == "idle":
        return Work()
    if kind == "key":
        import redis.asyncio

        client: Any = redis.asyncio.Redis.from_url(store) if awaits else redis.Redis.from_url(store)
        return Work(lambda order: client.set(f"done:{order}", "1", ex=60))
    import psycopg

    from effectonce.messaging import cursors

    with psycopg.connect(database, autocommit=True) as own:
        own.execute(
            "CREATE TABLE done (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL)"
        )
        for statement in cursors.schema("postgresql"):
            own.execute(statement.encode())
    connection: Any
    if awaits:
        connection = await psycopg.AsyncConnection.connect(database, autocommit=True)
    else:
        connection = psycopg.connect(database, autocommit=True)

    def write(order: str) -> Any:
        return connection.execute("INSERT INTO done (name) VALUES (%s)", (order,))

    return Work(write, _beginning(connection, awaits) if kind == "atomic" else None)


def _beginning(connection: Any, awaits: bool) -> Begin:
    """Transactions of a connection that is held, one after the other."""

    @contextmanager
    def begin() -> Iterator[Any]:
        with connection.transaction():
            yield connection

    @asynccontextmanager
    async def abegin() -> AsyncIterator[Any]:
        async with connection.transaction():
            yield connection

    return abegin if awaits else begin


class Handlers:
    """What is to be done with a payload, and how often it was."""

    def __init__(self, write: Write | None) -> None:
        self.runs = 0
        self.at_run: Callable[[], object] = lambda: None
        self._write = write

    def handle(self, payload: Any) -> None:
        """The handler of a blocking consumer."""
        if self._write is not None:
            self._write(payload["order"])
        self.runs += 1
        self.at_run()

    async def ahandle(self, payload: Any) -> None:
        """The handler of a consumer on an event loop."""
        if self._write is not None:
            await self._write(payload["order"])
        self.runs += 1
        self.at_run()


class RawConsumer:
    """The least code that does the same."""

    def __init__(self, source: Source, handlers: Handlers, begin: Begin | None, *, is_crowd: bool) -> None:
        self._source, self._handlers = source, handlers
        self._begin = begin or nullcontext
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
        with self._begin():
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
        async with self._begin():
            for payload in payloads:
                await self._handlers.ahandle(payload)


class OurConsumer:
    """A consumer of effectonce whose connection stays open from slice to slice, as it does in use."""

    def __init__(self, source: Source, handlers: Handlers, receiver: Receiver, **options: Any) -> None:
        self._handlers, self._awaits = handlers, source.awaits
        consumer = self._consumer = source.consumer(receiver, batch=BATCH, **options)
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

        def handler(message: Message, connection: Any = None) -> None:
            handlers.handle(message.payload)

        async def ahandler(message: Message, connection: Any = None) -> None:
            await handlers.ahandle(message.payload)

        if self._awaits:
            await consumer.arun(ahandler)
        else:
            consumer.run(handler)
