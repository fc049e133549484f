"""Consumers in atomic mode, killed in the middle: the effects in the user's database happened exactly once.

The sink is a table that refuses nothing, and an outbox: what ran twice and was committed twice would be there twice.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from nats.js.api import ConsumerConfig
from tests.integration import test_consumers_nats as jetstream
from tests.integration import test_consumers_redis as streams
from tests.integration import test_consumers_sqs as sqs_queues
from tests.integration.consumers_atomic import Sink, atomic, batter
from tests.integration.consumers_helpers import STORM, Books, deliveries, working
from tests.integration.test_consumers_kafka import PARTITIONS, Topic, consume
from tests.integration.test_consumers_rabbitmq import Queue

from effectonce import Message
from effectonce.errors import UsageError

SIZES = pytest.mark.parametrize(
    "messages", [pytest.param(100, marks=STORM), pytest.param(10_000, marks=pytest.mark.soak)]
)
DAILY = [("confluent", "cursor"), ("confluent_aio", "records"), ("aiokafka", "cursor")]
SERVERS = {"postgresql": "postgres", "mysql": "mariadb"}


def kills_of(messages: int) -> int:
    return 1 if messages < 1000 else 12


@pytest.fixture
def make_sink(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Sink]]:
    """Makes a database to write to, on an engine."""
    sinks: list[Sink] = []

    def make(dialect: str) -> Sink:
        url = (
            f"sqlite:///{tmp_path / 'shop.db'}"
            if dialect == "sqlite"
            else request.getfixturevalue(SERVERS[dialect]).url
        )
        sinks.append(Sink(dialect, url))
        sinks[-1].prepare()
        return sinks[-1]

    yield make
    for sink in sinks:
        sink.remove()


def check(sink: Sink, orders: set[str]) -> list[str]:
    """Each effect once, and each event; the effects in order."""
    written = sink.written()
    assert set(Counter(written).values()) == {1}
    assert set(written) == orders
    assert sorted(sink.announced()) == sorted(orders)
    return written


# With records


@SIZES
def test_redis_streams(messages: int, valkey: Any, make_sink: Any, tmp_path: Path, request: Any) -> None:
    """On SQLite."""
    sink, stream, sent = make_sink("sqlite"), f"orders:{request.node.name}", deliveries(messages)
    url = streams.url_of(valkey)
    with redis.Redis.from_url(url) as client:
        for order in sent:
            streams.add(client, stream, order)

        def is_drained() -> bool:
            return not streams.pending(client, stream)

        def start() -> Any:
            return atomic("redis_streams", tmp_path, sink, url=url, stream=stream)

        batter(start, tmp_path, lambda: len(sink.written()), messages, is_drained, kills=kills_of(messages))
    check(sink, set(sent))


@SIZES
@pytest.mark.parametrize(("kind", "dialect"), [("pika", "mysql"), ("aio_pika", "postgresql")])
def test_rabbitmq(
    kind: str, dialect: str, messages: int, rabbitmq: Any, make_sink: Any, tmp_path: Path, request: Any
) -> None:
    """With pika on MariaDB, with aio-pika on PostgreSQL."""
    name = "".join(each if each.isalnum() else "_" for each in request.node.name)
    sink, queue, sent = make_sink(dialect), Queue(rabbitmq.url, name), deliveries(messages)
    for order in sent:
        queue.publish(order)

    def start() -> Any:
        return atomic(kind, tmp_path, sink, url=rabbitmq.url, queue=queue.name)

    kills = kills_of(messages)
    batter(start, tmp_path, lambda: len(sink.written()), messages, lambda: not queue.size(), kills=kills)
    queue.close()
    check(sink, set(sent))


@SIZES
def test_sqs(messages: int, sqs: Any, make_sink: Any, tmp_path: Path, request: Any) -> None:
    """On PostgreSQL."""
    sink, sent = make_sink("postgresql"), deliveries(messages)
    queue = sqs_queues.Queue(sqs, "".join(each if each.isalnum() else "-" for each in request.node.name)[:60])
    for order in sent:
        queue.send(order)

    def start() -> Any:
        return atomic("sqs", tmp_path, sink, url=queue.url, **queue.settings)

    kills = kills_of(messages)
    batter(start, tmp_path, lambda: len(sink.written()), messages, lambda: queue.size() == 0, kills=kills)
    queue.client.close()
    check(sink, set(sent))


@SIZES
@pytest.mark.parametrize("cursor", [False, True], ids=["records", "cursor"])
def test_jetstream(
    cursor: bool, messages: int, nats: Any, make_sink: Any, tmp_path: Path, request: Any
) -> None:
    """On PostgreSQL. With a cursor repetitions by the sender are messages of their own, so each is sent once."""
    stream = "".join(each if each.isalnum() else "_" for each in request.node.name)
    sink = make_sink("postgresql")
    sent = [f"o-{number}" for number in range(messages)] if cursor else deliveries(messages)

    async def prepare() -> None:
        async with jetstream.connected(nats, stream) as context:
            await context.add_consumer(stream, ConsumerConfig(durable_name="billing", ack_wait=1.0))
            for order in sent:
                await jetstream.publish(context, stream, None, json.dumps({"order": order}).encode())

    async def left() -> int:
        async with jetstream.connected(nats) as context:
            return await jetstream.unacknowledged(context, stream)

    asyncio.run(prepare())

    def start() -> Any:
        return atomic("jetstream", tmp_path, sink, url=nats.url, stream=stream, cursor=cursor)

    batter(
        start,
        tmp_path,
        lambda: len(sink.written()),
        messages,
        lambda: not asyncio.run(left()),
        kills=kills_of(messages),
        members=2 if cursor else 1,
    )
    check(sink, set(sent))
    if cursor:
        assert sink.ask(f"SELECT count(*) FROM records_{sink.name}") == [(0,)]


# Kafka: killed, rebalanced, in order


def produce(topic: Topic, sent: list[str]) -> None:
    for order in sent:
        topic.produce(order, partition=int(order[2:]) % PARTITIONS)
    topic.flush()


def check_order(effects: list[str], sent: list[str]) -> None:
    """The effects of each partition in the order in which they were first sent."""
    first_sent = list(dict.fromkeys(sent))
    for partition in range(PARTITIONS):
        mine = [effect for effect in effects if int(effect[2:]) % PARTITIONS == partition]
        assert mine == [order for order in first_sent if int(order[2:]) % PARTITIONS == partition]


KAFKA = [
    pytest.param(
        kind, cursor, messages, marks=pytest.mark.soak if is_soak else (), id=f"{kind}-{mode}-{messages}"
    )
    for kind in ("confluent", "confluent_aio", "aiokafka")
    for mode, cursor in (("records", False), ("cursor", True))
    for messages in (100, 10_000)
    # A member that is killed is missed after six seconds: three of these will do for every day.
    for is_soak in [messages > 100 or (kind, mode) not in DAILY]
]


@pytest.mark.parametrize(("kind", "cursor", "messages"), KAFKA)
def test_kafka(kind: str, cursor: bool, messages: int, topic: Topic, make_sink: Any, tmp_path: Path) -> None:
    """On PostgreSQL. With a cursor the offsets are in the database, and so is the order that they keep."""
    sink = make_sink("postgresql")
    sent = [f"o-{number}" for number in range(messages)] if cursor else deliveries(messages)
    produce(topic, sent)
    settings = {"topic": topic.name, **topic.configuration}

    def start() -> Any:
        return atomic(kind, tmp_path, sink, cursor=cursor, **settings)

    kills = kills_of(messages)
    batter(start, tmp_path, lambda: len(sink.written()), messages, topic.is_done, kills=kills, members=2)
    check_order(check(sink, set(sent)), sent)
    if cursor:
        assert sink.ask(f"SELECT count(*) FROM records_{sink.name}") == [(0,)]
        rows = sink.ask(f"SELECT low FROM effectonce_cursors WHERE consumer = 'billing-{sink.name}'")
        assert sum(low for (low,) in rows) == messages


@pytest.mark.parametrize("name", ["confluent", "confluent_aio", "aiokafka"])
def test_an_assigned_partition_is_read_from_its_cursor_on(name: str, topic: Topic, make_sink: Any) -> None:
    """Also where the group has committed more: a database that was restored gets again what it lacks.

    A cursor beyond the end of its partition belongs to another topic of the same name, and is refused.
    """
    sink = make_sink("postgresql")
    begin = sink.blocking if name == "confluent" else sink.asyncio
    for number in range(6):
        topic.produce(f"o-{number}", partition=0)
    topic.flush()

    def consume_until(count: int) -> None:
        def handler(message: Message, connection: Any) -> Any:
            return (
                sink.handle(message, connection) if name == "confluent" else sink.ahandle(message, connection)
            )

        with sink.receiver() as receiver:
            until = lambda: len(sink.written()) >= count and topic.is_done()  # noqa: E731
            consume(name, topic, receiver, handler, until, transaction=begin, cursor=True)

    consume_until(6)
    rows = f"effectonce_cursors WHERE consumer = 'billing-{sink.name}' AND source = '{topic.name}/0'"
    assert sink.ask(f"SELECT low FROM {rows}") == [(6,)]
    sink.ask(
        f"DELETE FROM {sink.effects} WHERE id >= 'o-4'",
        f"UPDATE {rows.replace(' WHERE', ' SET low = 4 WHERE')}",
    )
    consume_until(6)
    assert sink.written() == [f"o-{number}" for number in range(6)]
    sink.ask(f"UPDATE {rows.replace(' WHERE', ' SET low = 7 WHERE')}")
    with pytest.raises(UsageError, match="deleted and made again"):
        consume_until(7)


@pytest.mark.parametrize("name", ["confluent", "confluent_aio", "aiokafka"])
def test_a_topic_that_is_made_again_under_a_running_consumer_is_told(
    name: str, topic: Topic, make_sink: Any
) -> None:
    """Its numbers begin anew, and what is in it would count as done without a word."""
    sink = make_sink("postgresql")
    begin = sink.blocking if name == "confluent" else sink.asyncio
    for number in range(3):
        topic.produce(f"o-{number}", partition=0)
    topic.flush()
    made_again: list[bool] = []

    def make_again() -> bool:
        if len(sink.written()) == 3 and topic.is_done() and not made_again:
            made_again.append(True)
            topic.make_again()
            topic.produce("new", partition=0)
            topic.flush()
        return False

    def handler(message: Message, connection: Any) -> Any:
        return sink.handle(message, connection) if name == "confluent" else sink.ahandle(message, connection)

    with sink.receiver() as receiver, pytest.raises(UsageError, match="deleted and made again"):
        consume(name, topic, receiver, handler, make_again, transaction=begin, cursor=True)
    assert made_again


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["kafka", "kafka_asyncio"])
def test_kafka_in_fenced_mode(kind: str, topic: Topic, tmp_path: Path) -> None:
    """The same battering, at a sink that checks fences."""
    messages, books = 10_000, Books(tmp_path / "books.db")
    sent = deliveries(messages)
    produce(topic, sent)
    settings = {"topic": topic.name, **topic.configuration}

    def start() -> Any:
        return working(kind, tmp_path, **settings)

    batter(start, tmp_path, lambda: len(books.effects()), messages, topic.is_done, kills=12, members=2)
    effects = books.effects()
    assert set(Counter(effects).values()) == {1}
    assert set(effects) == set(sent)
    check_order(effects, sent)
