"""Consumers of Kafka, through confluent-kafka and aiokafka: effects once and in order, through kills and rebalances."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from tests.integration.consumers_helpers import SIZES, Books, deliveries, fell, stop_when, storm, working

from effectonce import Message, Policy, Receiver
from effectonce.errors import UsageError
from effectonce.messaging import kafka as messaging_kafka
from effectonce.messaging._delivery import Ack, DeadLetter, Nack, Verdict
from effectonce.messaging._kafka import Pauses, Place, Record, delivery_of, plan
from effectonce.testing.clocks import wait_until

CLIENTS = pytest.mark.parametrize("name", ["confluent", "confluent_aio", "aiokafka"])
PARTITIONS = 3
GROUP = "billing"
LARGEST = 1_048_588
"""Bytes that the broker takes at once."""


# Offsets, without a broker


def settled(*verdicts: tuple[int, int, Verdict]) -> Any:
    return [
        (delivery_of(Record(Place("t", partition), offset, None, b"1", (), None), None), verdict)
        for partition, offset, verdict in verdicts
    ]


def test_offsets_are_committed_up_to_the_first_that_comes_again() -> None:
    """Each partition for itself; and nothing after that one is put aside, for it comes again too."""
    letter = DeadLetter("undecodable")
    found = plan(
        settled(
            (0, 5, Ack()), (1, 7, Nack(2.0, "failed")), (0, 8, letter), (1, 8, letter), (0, 9, Nack(1.0, "failed")),
            (0, 10, Ack()), (2, 1, Ack()),
        )
    )  # fmt: skip
    assert found.commits == {("t", 0): 9, ("t", 2): 2}
    assert found.again == {("t", 0): (9, 1.0), ("t", 1): (7, 2.0)}
    assert [(each.handle.place, each.handle.offset) for each, _ in found.letters] == [(("t", 0), 8)]


def test_partitions_rest_until_their_time() -> None:
    """And are forgotten when they are given away."""
    pauses, one, two = Pauses(), Place("t", 1), Place("t", 2)
    pauses.rest(one, 10.0)
    pauses.rest(two, 20.0)
    assert pauses.wait(9.5) == 0.5
    assert pauses.due(9.0) == []
    assert pauses.due(10.0) == [one]
    pauses.forget([two])
    assert (pauses.due(30.0), pauses.resting()) == ([], set())


def test_an_id_header_that_comes_twice_is_no_id() -> None:
    """Which of them would it be?"""
    record = Record(Place("t", 0), 1, None, b"1", [("id", b"a"), ("id", b"b")], None)
    assert delivery_of(record, None).ids[0][1] == [b"a", b"b"]


# With Kafka


class Topic:
    """A topic to produce to and to look at."""

    def __init__(self, server: Any, name: str, partitions: int = PARTITIONS) -> None:
        self.name = name
        self.servers = server.url.removeprefix("kafka://")
        self._admin = AdminClient({"bootstrap.servers": self.servers, "log_level": 0})
        topics = [NewTopic(name, partitions, 1), NewTopic(f"{name}.dead", 1, 1)]
        for made in self._admin.create_topics(topics).values():
            made.result(20)
        self._producer = Producer(
            {
                "bootstrap.servers": self.servers,
                "enable.idempotence": True,  # else what is sent again comes out of order
                "linger.ms": 0,
                "log_level": 0,
                "message.max.bytes": LARGEST,
            }
        )
        self._looker = Consumer(self.configuration | {"enable.auto.commit": False})

    @property
    def configuration(self) -> dict[str, Any]:
        """With patience as short as the broker allows, so that the dead are missed soon."""
        return {
            "bootstrap.servers": self.servers,
            "group.id": f"{GROUP}-{self.name}",
            "session.timeout.ms": 6000,
        }

    def produce(self, order: str | None, body: bytes | None = None, key: str = "k", **more: Any) -> None:
        value = json.dumps({"order": order}).encode() if body is None else body
        headers = [] if order is None else [("id", order.encode())]
        self._producer.produce(self.name, value, key, headers=more.pop("headers", headers), **more)

    def flush(self) -> None:
        assert self._producer.flush(30) == 0

    def is_done(self) -> bool:
        """Whether all that was produced is committed."""
        places = [TopicPartition(self.name, number) for number in range(PARTITIONS)]
        committed = self._looker.committed(places, timeout=10)
        return all(
            max(each.offset, 0) >= self._looker.get_watermark_offsets(each, timeout=10)[1]
            for each in committed
        )

    def letters(self) -> list[dict[str, bytes]]:
        """The headers of dead letters, and under "" the value."""
        dead = TopicPartition(f"{self.name}.dead", 0, 0)
        end = self._looker.get_watermark_offsets(dead, timeout=10)[1]
        self._looker.assign([dead])
        found = [self._looker.poll(10) for _ in range(end)]
        self._looker.unassign()
        return [{"": each.value(), **dict(each.headers() or ())} for each in found if each is not None]

    def make_again(self) -> None:
        """Delete it, and make one of the same name."""
        self._admin.delete_topics([self.name])[self.name].result(20)
        wait_until(
            lambda: (
                self._admin.create_topics([NewTopic(self.name, PARTITIONS, 1)])[self.name].exception(20)
                is None
            )
        )

    def close(self) -> None:
        self._looker.close()
        self._producer.close()


def consume(
    name: str, topic: Topic, receiver: Receiver, handler: Any, until: Callable[[], object], **options: Any
) -> None:
    """Consume, with either client, until something is the case."""
    choices: dict[str, Any] = {"receiver": receiver, "retry": ("50ms", "100ms")} | options
    if name == "confluent":
        consumer = messaging_kafka.Consumer(topic.configuration, topic.name, **choices)
        stop_when(consumer, until, time.monotonic() + 60)
        consumer.run(handler)
        return

    async def coroutine(*args: Any) -> Any:
        result = handler(*args)
        return await result if asyncio.iscoroutine(result) else result

    async def main() -> None:
        if name == "confluent_aio":
            consumer = messaging_kafka.Consumer(topic.configuration, topic.name, **choices)
            stop_when(consumer, until, time.monotonic() + 60)
            await consumer.arun(coroutine)
            return
        settings = {name.replace(".", "_"): value for name, value in topic.configuration.items()}
        client = AIOKafkaConsumer(**settings, enable_auto_commit=False, auto_offset_reset="earliest")
        producer = AIOKafkaProducer(bootstrap_servers=topic.servers)
        async with client, producer:
            consumer = messaging_kafka.Consumer(client, topic.name, producer=producer, **choices)
            stop_when(consumer, until, time.monotonic() + 60)
            await consumer.arun(coroutine)

    asyncio.run(main())


@SIZES
@pytest.mark.parametrize("kind", ["kafka", "kafka_asyncio"])
def test_killed_and_rebalanced_consumers_leave_each_effect_once_and_in_order(
    kind: str, messages: int, topic: Topic, tmp_path: Path
) -> None:
    """Records that come up to four times, two members of the group of which one is killed, and a third that joins.

    Each effect once, all offsets committed, and the effects of a partition in the order in which they were first sent.
    """
    sent = deliveries(messages)
    for order in sent:
        topic.produce(order, partition=int(order[2:]) % PARTITIONS)
    topic.flush()
    settings = {"topic": topic.name, **topic.configuration}
    with working(kind, tmp_path, **settings) as companion:
        effects = storm(kind, tmp_path, messages, topic.is_done, again=60, **settings)
        assert not fell(companion)
    first_sent = list(dict.fromkeys(sent))
    for partition in range(PARTITIONS):
        mine = [effect for effect in effects if int(effect[2:]) % PARTITIONS == partition]
        assert mine == [order for order in first_sent if int(order[2:]) % PARTITIONS == partition]
    assert topic.letters() == []
    assert len(Books(tmp_path / "books.db").effects()) == messages


@CLIENTS
def test_bad_records_are_put_aside_with_a_reason_and_the_rest_goes_on(name: str, topic: Topic) -> None:
    """What can never be processed goes to the dead-letter topic, whole; good records around it are handled."""
    topic.produce("good-1")
    topic.produce("undecodable", b"{", headers=[("id", b"undecodable"), ("trace", b"t-1")])
    topic.produce(None, headers=[("id", b"\xff")])
    topic.produce(None, headers=[("id", b"a"), ("id", b"b")])
    topic.produce("future", timestamp=int(time.time() * 1000) + 3_600_000)
    topic.produce("large", json.dumps("x" * 2000).encode())
    topic.produce("good-1", b'{"order": "another"}')
    topic.produce(None, b'{"order": "placed"}')
    topic.flush()
    ran: list[str] = []
    with Receiver("memory://") as receiver:

        def handler(message: Message) -> None:
            ran.append(message.payload["order"])

        consume(name, topic, receiver, handler, topic.is_done, max_body=1000)
    assert ran == ["good-1", "placed"]
    letters = topic.letters()
    reasons = ["undecodable", "invalid_id", "invalid_id", "future", "too_large", "mismatch"]
    assert [letter["dead-reason"].decode() for letter in letters] == reasons
    assert (letters[0][""], letters[0]["trace"], letters[0]["id"]) == (b"{", b"t-1", b"undecodable")


@CLIENTS
def test_a_bad_record_as_large_as_can_be_is_put_aside_in_parts(name: str, topic: Topic) -> None:
    """Together with the reason it is larger than a record may be. It must not stop its partition for ever."""
    body = b"{" * (LARGEST - 300)
    topic.produce("large", body, partition=0)
    topic.produce("good", partition=0)
    topic.flush()
    ran: list[str] = []
    with Receiver("memory://") as receiver:
        consume(name, topic, receiver, lambda m: ran.append(m.id), topic.is_done)
    assert ran == ["good"]
    letters = topic.letters()
    assert [letter["dead-part"] for letter in letters] == [b"1/2", b"2/2"]
    assert [letter["dead-reason"] for letter in letters] == [b"undecodable"] * 2
    assert b"".join(letter[""] for letter in letters) == body


@CLIENTS
def test_headers_that_leave_no_room_for_a_reason_are_put_aside_in_parts_of_their_own(
    name: str, topic: Topic
) -> None:
    """Here it is not the value that is too large with the reason. It must not stop its partition either."""
    topic.produce(None, b"{", partition=0, headers=[("large", b"x" * (LARGEST - 300)), ("hop", b"\xff")])
    topic.produce("good", partition=0)
    topic.flush()
    ran: list[str] = []
    with Receiver("memory://") as receiver:
        consume(name, topic, receiver, lambda m: ran.append(m.id), topic.is_done)
    assert ran == ["good"]
    first, *others = topic.letters()
    assert (first[""], first["dead-reason"]) == (b"{", b"undecodable")
    assert {each["dead-headers"] for each in others} == {b"json"}
    written = json.loads(b"".join(each[""] for each in others))
    assert written == [["large", "x" * (LARGEST - 300)], ["hop", "\\xff"]]


@CLIENTS
def test_an_id_that_was_asked_for_and_is_missing_is_refused(name: str, topic: Topic) -> None:
    """Then a place in the topic does not serve: the sender has promised an id."""
    topic.produce("o-1", partition=0)
    topic.produce(None, partition=0, headers=[("order-id", None)])
    topic.produce(None, partition=0, headers=[("order-id", b"o-2")])
    topic.flush()
    ran: list[str] = []
    with Receiver("memory://") as receiver:
        consume(name, topic, receiver, lambda m: ran.append(m.id), topic.is_done, id="order-id")
    assert ran == ["o-2"]
    assert [letter["dead-reason"] for letter in topic.letters()] == [b"no_id", b"no_id"]


@CLIENTS
def test_a_failure_stops_its_partition_until_it_has_come_again(name: str, topic: Topic) -> None:
    """What comes after it waits, in order; other partitions go on; used-up attempts make it a dead letter."""
    for order, partition in (("a1", 0), ("flaky", 0), ("a3", 0), ("poison", 1), ("b2", 1), ("c1", 2)):
        topic.produce(order, partition=partition)
    topic.flush()
    ran: list[str] = []

    def handler(message: Message) -> None:
        ran.append(message.id)
        if message.id == "poison" or (message.id == "flaky" and ran.count("flaky") < 3):
            raise ValueError("not today")

    with Receiver("memory://", policy=Policy(max_attempts=3)) as receiver:
        consume(name, topic, receiver, handler, topic.is_done)
    assert [order for order in ran if order in ("a1", "flaky", "a3")] == [
        "a1",
        "flaky",
        "flaky",
        "flaky",
        "a3",
    ]
    assert [order for order in ran if order in ("poison", "b2")] == ["poison"] * 3 + ["b2"]
    assert ran.count("c1") == 1
    (letter,) = topic.letters()
    assert letter["dead-reason"] == b"attempts_exhausted"
    assert letter["dead-consumer"].decode() == f"{GROUP}-{topic.name}"


@CLIENTS
def test_a_long_handler_keeps_its_partitions(name: str, topic: Topic) -> None:
    """The group is asked for something meanwhile, and nothing of what comes is lost by that."""
    topic.produce("slow", partition=0)
    topic.flush()
    beats: list[int] = []
    ran: list[str] = []

    def handler(message: Message) -> None:
        ran.append(message.id)

    async def aslow(message: Message) -> None:
        handler(message)
        if message.id == "slow":
            await asyncio.to_thread(produce_and_wait)

    def slow(message: Message) -> None:
        handler(message)
        if message.id == "slow":
            produce_and_wait()

    def produce_and_wait() -> None:
        for partition in range(PARTITIONS):
            topic.produce(f"later-{partition}", partition=partition)
        topic.flush()
        wait_until(lambda: len(beats) >= 3)

    def with_beats(consumer: messaging_kafka.Consumer) -> messaging_kafka.Consumer:
        broker: Any = consumer._broker
        broker.deadline = 0.3
        extend = broker.extend

        async def counted(under_way: Any) -> None:
            await extend(under_way)
            beats.append(len(under_way))

        broker.extend = counted
        stop_when(consumer, topic.is_done, time.monotonic() + 60)
        return consumer

    async def main(receiver: Receiver) -> None:
        if name == "confluent_aio":
            consumer = messaging_kafka.Consumer(topic.configuration, topic.name, receiver=receiver)
            await with_beats(consumer).arun(aslow)
            return
        settings = {name.replace(".", "_"): value for name, value in topic.configuration.items()}
        client = AIOKafkaConsumer(**settings, enable_auto_commit=False, auto_offset_reset="earliest")
        producer = AIOKafkaProducer(bootstrap_servers=topic.servers)
        async with client, producer:
            consumer = messaging_kafka.Consumer(client, topic.name, receiver=receiver, producer=producer)
            await with_beats(consumer).arun(aslow)

    with Receiver("memory://") as receiver:
        if name == "confluent":
            with_beats(messaging_kafka.Consumer(topic.configuration, topic.name, receiver=receiver)).run(slow)
        else:
            asyncio.run(main(receiver))
    assert len(beats) >= 3
    assert sorted(ran) == ["later-0", "later-1", "later-2", "slow"]


@CLIENTS
def test_a_partition_that_rests_goes_on_after_a_rebalance(name: str, topic: Topic) -> None:
    """Its pause belongs to who had it before; whoever gets it begins at once, also if that is the same consumer."""
    topic.produce("flaky", partition=0)
    topic.flush()
    ran: list[str] = []
    other: list[threading.Thread] = []

    def join_and_leave() -> None:
        member = Consumer(topic.configuration | {"enable.auto.commit": False})
        member.subscribe([topic.name])
        deadline = time.monotonic() + 60
        while not member.assignment() and time.monotonic() < deadline:
            member.poll(0.1)
        member.close()

    def handler(message: Message) -> None:
        ran.append(message.id)
        if len(ran) == 1:
            other.append(threading.Thread(target=join_and_leave))
            other[0].start()
            raise ValueError("not now")

    with Receiver("memory://") as receiver:
        consume(name, topic, receiver, handler, topic.is_done, retry=("10m", "10m"))
    other[0].join()
    assert ran == ["flaky", "flaky"]


def test_a_consumer_that_commits_by_itself_or_not_at_all_is_refused() -> None:
    """It would commit what is not done yet; without a group it can commit nothing."""

    async def with_aiokafka(receiver: Receiver, **settings: Any) -> None:
        client = AIOKafkaConsumer(bootstrap_servers="127.0.0.1:1", **settings)
        try:
            messaging_kafka.Consumer(client, "t", receiver=receiver)
        finally:
            await client.stop()

    with Receiver("memory://") as receiver:
        with pytest.raises(UsageError, match="Leave it out"):
            messaging_kafka.Consumer({"group.id": "g", "enable.auto.commit": True}, "t", receiver=receiver)
        with pytest.raises(UsageError, match=r"group\.id"):
            messaging_kafka.Consumer({}, "t", receiver=receiver)
        with pytest.raises(UsageError, match="enable_auto_commit=False"):
            asyncio.run(with_aiokafka(receiver, group_id="g"))
        with pytest.raises(UsageError, match="group_id="):
            asyncio.run(with_aiokafka(receiver, enable_auto_commit=False))
        with pytest.raises(UsageError, match="neither") as refused:
            messaging_kafka.Consumer("kafka://shop:secret@localhost", "t", receiver=receiver)
    assert "secret" not in str(refused.value), "a URL has a password"
