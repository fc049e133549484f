"""The outbox's relay, and publishers alone, each against the least code that does the same work in windows of 1000.

The raw relay selects rows with SKIP LOCKED, adds them to a stream in a pipeline and deletes them, in one transaction:
no lease, no order, no attempts. Raw publishers send a window with ids and wait for all confirmations.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from time import perf_counter, process_time
from typing import Any
from uuid import uuid4

from benchmarks.workers.base import Figure, Setup, Subject

WINDOW = 1000
AGGREGATES = 5000
PAYLOAD = b'{"order":"o-000001","status":"paid","cents":1999,"currency":"EUR","customer":"c-10001"}' * 2
PLAIN = """\
CREATE TABLE plain_outbox (seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text NOT NULL, topic text NOT NULL,
                           aggregate text, payload bytea NOT NULL)"""
SESSION = "SET synchronous_commit = off; SET enable_seqscan = off; SET enable_sort = off; SET enable_bitmapscan = off"
TAKE = """\
SELECT seq, id, topic, aggregate, payload FROM plain_outbox ORDER BY seq LIMIT 1000 FOR UPDATE SKIP LOCKED"""
DROP = "DELETE FROM plain_outbox WHERE seq = ANY(%s)"


def open_subject(setup: Setup, contender: str) -> Subject:
    """A relay or a publisher, of effectonce or raw."""
    if setup.op == "relay":
        database, broker = setup.url.split()
        relay = _OurRelay if contender == "effectonce" else _RawRelay
        return Relaying(database, relay(database, broker))
    return Publishing(setup.url, RAW[setup.store] if contender == "raw" else _ours)


class Relaying:
    """Fills the outbox, then times how long it takes to be empty."""

    def __init__(self, database: str, relay: Any) -> None:
        import psycopg

        self._connection: Any = psycopg.connect(database, autocommit=True)
        self._relay = relay
        relay.make(self._connection)

    def slice(self, operations: int) -> Figure:
        """Relay that many events."""
        self._connection.execute(
            f"INSERT INTO {self._relay.table} (id, topic, aggregate, payload) "
            "SELECT 'orders-' || md5(random()::text), 'orders', 'a' || n %% %s, %s FROM generate_series(1, %s) AS n",
            (AGGREGATES, PAYLOAD, operations),
        )
        start, start_cpu = perf_counter(), process_time()
        relayed = self._relay.run()
        seconds, cpu = perf_counter() - start, process_time() - start_cpu
        if relayed != operations:
            raise AssertionError(f"{relayed} events were relayed where {operations} were due")
        return {"value": seconds / operations, "operations": operations, "cpu": cpu / operations}

    def close(self) -> None:
        """Close the connections."""
        self._relay.close()
        self._connection.close()


class _OurRelay:
    table = "effectonce_outbox"

    def __init__(self, database: str, broker: str) -> None:
        from effectonce.outbox import Relay

        self._relay = Relay(database, broker, batch=WINDOW)
        self.run, self.close = self._relay.run_once, self._relay.close

    def make(self, _: Any) -> None:
        self._relay._database.migrate()


class _RawRelay:
    table = "plain_outbox"

    def __init__(self, database: str, broker: str) -> None:
        import psycopg
        import redis

        self._connection: Any = psycopg.connect(database, autocommit=True, prepare_threshold=1)
        self._connection.execute(SESSION)
        self._client = redis.Redis.from_url(broker)

    def make(self, connection: Any) -> None:
        connection.execute(PLAIN)

    def run(self) -> int:
        relayed = 0
        while rows := self._round():
            relayed += rows
        return relayed

    def _round(self) -> int:
        with self._connection.transaction():
            rows = self._connection.cursor(binary=True).execute(TAKE).fetchall()
            if rows:
                pipeline = self._client.pipeline(transaction=False)
                for _, name, topic, key, payload in rows:
                    pipeline.xadd(topic, {"id": name, "key": key, "payload": payload})
                pipeline.execute()
                self._connection.execute(DROP, ([row[0] for row in rows],))
            return len(rows)

    def close(self) -> None:
        self._client.close()
        self._connection.close()


Publish = Callable[[Sequence[Any]], Coroutine[Any, Any, None]]
Opened = tuple[Publish, Callable[[], Coroutine[Any, Any, None]]]


class Publishing:
    """Publishes windows of events on an event loop, and waits for each window's confirmations."""

    def __init__(self, url: str, opened: Callable[[str, str], Coroutine[Any, Any, Opened]]) -> None:
        self._runner = asyncio.Runner()
        self._topic = f"bench-{uuid4().hex}"
        self._runner.run(_make_topic(url, self._topic))
        self._publish, self._close = self._runner.run(opened(url, self._topic))

    def slice(self, operations: int) -> Figure:
        """Publish that many events."""
        from effectonce.outbox import Event

        events = [
            Event(n, f"{random.getrandbits(128):032x}", self._topic, f"a{n}", PAYLOAD, {}, 1, 0.0)
            for n in range(operations)
        ]
        start, start_cpu = perf_counter(), process_time()
        for place in range(0, operations, WINDOW):
            self._runner.run(self._publish(events[place : place + WINDOW]))
        seconds, cpu = perf_counter() - start, process_time() - start_cpu
        return {"value": seconds / operations, "operations": operations, "cpu": cpu / operations}

    def close(self) -> None:
        """Close the connection and the loop."""
        self._runner.run(self._close())
        self._runner.close()


async def _make_topic(url: str, topic: str) -> None:
    if url.startswith("nats"):
        import nats

        client = await nats.connect(url)
        await client.jetstream().add_stream(name=topic, subjects=[topic])
        await client.close()
    else:
        import aiormq

        connection = await aiormq.connect(url)
        channel = await connection.channel()
        await channel.queue_declare(topic, durable=True, arguments={"x-max-length": 10_000})
        await connection.close()


async def _ours(url: str, topic: str) -> Opened:
    from effectonce.outbox.publishers import open_publisher

    publisher: Any = open_publisher(url)

    async def publish(events: Sequence[Any]) -> None:
        if any(await publisher.publish(events)):
            raise AssertionError("an event was not confirmed")

    return publish, publisher.close


async def _raw_nats(url: str, topic: str) -> Opened:
    """Quicker than ``publish_async`` of nats-py, which makes a future for each message."""
    import nats

    client = await nats.connect(url)
    inbox, left, done = client.new_inbox(), 0, asyncio.Event()

    async def heard(_: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    await client.subscribe(inbox, cb=heard)

    async def publish(events: Sequence[Any]) -> None:
        nonlocal left
        left = len(events)
        done.clear()
        for event in events:
            await client.publish(topic, event.payload, reply=inbox, headers={"Nats-Msg-Id": event.id})
        await done.wait()

    return publish, client.close


async def _raw_rabbitmq(url: str, topic: str) -> Opened:
    """A window in one write, and one count of confirmations: quicker than ``basic_publish`` of aiormq."""
    import aiormq
    from aiormq.abc import ChannelFrame
    from pamqp.body import ContentBody
    from pamqp.frame import marshal
    from pamqp.header import ContentHeader

    connection = await aiormq.connect(url)
    channel: Any = await connection.channel(publisher_confirms=True)
    spec = aiormq.spec.Basic

    async def publish(events: Sequence[Any]) -> None:
        frames = []
        opening = marshal(spec.Publish(routing_key=topic), channel.number)
        for event in events:
            properties = spec.Properties(message_id=event.id, delivery_mode=2)
            header = ContentHeader(properties=properties, body_size=len(event.payload))
            body = ContentBody(event.payload)
            frames += [opening, marshal(header, channel.number), marshal(body, channel.number)]
            channel.delivery_tag += 1
            channel.confirmations[channel.delivery_tag] = channel.create_future()
        waiting = list(channel.confirmations.values())
        await channel.write_queue.put(ChannelFrame(payload=b"".join(frames), should_close=False))
        await asyncio.wait(waiting)

    return publish, connection.close


RAW = {"nats": _raw_nats, "rabbitmq": _raw_rabbitmq}
