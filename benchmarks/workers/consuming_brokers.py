"""Brokers for the consumers' cases: how each is filled, read and acknowledged with its own client, and ours on top.

What is written as coroutines for a blocking client never suspends, so that one raw loop serves both colours. A message
is read in the way its client's documentation shows for batches, and acknowledged as that client does it at best: many
at once where the broker can, else one by one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

BATCH = 100
WAIT_SECONDS = 5.0
GROUP = "bench"
Read = list[tuple[Any, bytes]]
"""Messages: what the client acknowledges each by, and its body."""


def bodies(count: int) -> list[tuple[str, bytes]]:
    """New messages: an id, and some ninety bytes of JSON."""
    ids = [uuid4().hex for _ in range(count)]
    return [(one, json.dumps({"order": one, "cents": 1999, "currency": "EUR"}).encode()) for one in ids]


class Source:
    """A place with messages, on one broker and through one client."""

    awaits = False

    def __init__(self, url: str) -> None:
        self.url, self.name = url, f"bench-{uuid4().hex}"

    async def open(self) -> None:
        """Make the place."""

    async def fill(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """Put messages there, all of which are there on return."""
        raise NotImplementedError

    async def subscribe(self) -> None:
        """Prepare to read without effectonce."""

    async def read(self, most: int) -> Read:
        """Some messages, once there are any."""
        raise NotImplementedError

    async def acknowledge(self, messages: Read) -> None:
        """These are done."""
        raise NotImplementedError

    def consumer(self, receiver: Any, **options: Any) -> Any:
        """The same place through effectonce."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close what was opened."""


class RedisStreams(Source):
    """A stream and its consumer group, by redis-py."""

    def _client(self) -> Any:
        import redis

        return redis.Redis.from_url(self.url)

    async def open(self) -> None:
        import redis

        self.client = self._client()
        self._filling = redis.Redis.from_url(self.url)
        self._filling.xgroup_create(self.name, GROUP, "0", mkstream=True)

    async def fill(self, messages: Sequence[tuple[str, bytes]]) -> None:
        pipeline = self._filling.pipeline(transaction=False)
        pipeline.xtrim(self.name, 0, approximate=False)
        for name, body in messages:
            pipeline.xadd(self.name, {"id": name, "payload": body})
        pipeline.execute()

    async def read(self, most: int) -> Read:
        answer = self.client.xreadgroup(GROUP, "raw", {self.name: ">"}, count=most, block=1000)
        return [(entry, fields[b"payload"]) for entry, fields in answer[0][1]]

    async def acknowledge(self, messages: Read) -> None:
        self.client.xack(self.name, GROUP, *[entry for entry, _ in messages])

    def consumer(self, receiver: Any, **options: Any) -> Any:
        from effectonce.messaging import redis_streams

        return redis_streams.Consumer(self.client, self.name, group=GROUP, receiver=receiver, **options)

    async def close(self) -> None:
        self.client.close()


class AsyncRedisStreams(RedisStreams):
    """The same on an event loop."""

    awaits = True

    def _client(self) -> Any:
        import redis.asyncio

        return redis.asyncio.Redis.from_url(self.url)

    async def read(self, most: int) -> Read:
        answer = await self.client.xreadgroup(GROUP, "raw", {self.name: ">"}, count=most, block=1000)
        return [(entry, fields[b"payload"]) for entry, fields in answer[0][1]]

    async def acknowledge(self, messages: Read) -> None:
        await self.client.xack(self.name, GROUP, *[entry for entry, _ in messages])

    async def close(self) -> None:
        await self.client.aclose()


class Pika(Source):
    """A queue, by pika."""

    async def open(self) -> None:
        import pika  # type: ignore[import-untyped]

        self._pika = pika
        self._filling = pika.BlockingConnection(pika.URLParameters(self.url))
        self._channel = self._filling.channel()
        self._channel.confirm_delivery()  # so that the last confirmation tells that all are there
        self._channel.queue_declare(self.name)
        self._got: list[Any] = []

    async def fill(self, messages: Sequence[tuple[str, bytes]]) -> None:
        quick = self._filling.channel()
        for name, body in messages[:-1]:
            quick.basic_publish("", self.name, body, self._pika.BasicProperties(message_id=name))
        quick.close()
        name, body = messages[-1]
        self._channel.basic_publish("", self.name, body, self._pika.BasicProperties(message_id=name))

    async def subscribe(self) -> None:
        self._reading = self._pika.BlockingConnection(self._pika.URLParameters(self.url))
        self._taking = self._reading.channel()
        self._taking.basic_qos(prefetch_count=2 * BATCH)
        self._taking.basic_consume(
            self.name, lambda _, method, about, body: self._got.append((method.delivery_tag, body))
        )

    async def read(self, most: int) -> Read:
        if not self._got:
            self._reading.process_data_events(time_limit=WAIT_SECONDS)
        some, self._got = self._got[:most], self._got[most:]
        return some

    async def acknowledge(self, messages: Read) -> None:
        self._taking.basic_ack(messages[-1][0], multiple=True)
        self._reading.process_data_events(time_limit=0)

    def consumer(self, receiver: Any, **options: Any) -> Any:
        from effectonce.messaging import rabbitmq

        return rabbitmq.Consumer(self._pika.URLParameters(self.url), self.name, receiver=receiver, **options)

    async def close(self) -> None:
        self._filling.close()


class AioPika(Pika):
    """The same by aio-pika."""

    awaits = True

    async def open(self) -> None:
        import aio_pika

        await super().open()
        self._reading = await aio_pika.connect_robust(self.url)

    async def subscribe(self) -> None:
        channel = await self._reading.channel()
        await channel.set_qos(prefetch_count=2 * BATCH)
        self._incoming: asyncio.Queue[Any] = asyncio.Queue()
        await (await channel.get_queue(self.name)).consume(self._incoming.put)

    async def read(self, most: int) -> Read:
        found = [await self._incoming.get()]
        while len(found) < most and not self._incoming.empty():
            found.append(self._incoming.get_nowait())
        return [(message, message.body) for message in found]

    async def acknowledge(self, messages: Read) -> None:
        await messages[-1][0].ack(multiple=True)

    def consumer(self, receiver: Any, **options: Any) -> Any:
        from effectonce.messaging import rabbitmq

        return rabbitmq.Consumer(self._reading, self.name, receiver=receiver, **options)


class Nats(Source):
    """A stream and its durable pull consumer."""

    awaits = True

    async def open(self) -> None:
        import nats

        self._client = await nats.connect(self.url)
        self._context = self._client.jetstream()
        await self._context.add_stream(name=self.name, subjects=[self.name], max_msgs=10_000)

    async def fill(self, messages: Sequence[tuple[str, bytes]]) -> None:
        for name, body in messages[:-1]:
            await self._client.publish(self.name, body, headers={"Nats-Msg-Id": name})
        name, body = messages[-1]
        await self._context.publish(self.name, body, headers={"Nats-Msg-Id": name})

    async def subscribe(self) -> None:
        self._subscription = await self._context.pull_subscribe(self.name, durable=GROUP, stream=self.name)

    async def read(self, most: int) -> Read:
        return [(m, m.data) for m in await self._subscription.fetch(most, timeout=WAIT_SECONDS)]

    async def acknowledge(self, messages: Read) -> None:
        for message, _ in messages:
            await message.ack()
        await self._client.flush()

    def consumer(self, receiver: Any, **options: Any) -> Any:
        from effectonce.messaging import nats as jetstream

        return jetstream.Consumer(self._context, self.name, durable=GROUP, receiver=receiver, **options)

    async def close(self) -> None:
        await self._client.close()


class Sqs(Source):
    """A standard queue of the emulator."""

    async def open(self) -> None:
        import boto3

        place = parse_qs(urlsplit(self.url).query)
        self._client = boto3.client("sqs", region_name=place["region"][0], endpoint_url=place["endpoint"][0])
        self._queue = self._client.create_queue(QueueName=self.name)["QueueUrl"]

    async def fill(self, messages: Sequence[tuple[str, bytes]]) -> None:
        for start in range(0, len(messages), 10):
            entries = [
                {"Id": str(number), "MessageBody": body.decode(), "MessageAttributes": _id_attribute(name)}
                for number, (name, body) in enumerate(messages[start : start + 10])
            ]
            self._client.send_message_batch(QueueUrl=self._queue, Entries=entries)

    async def read(self, most: int) -> Read:
        answer = self._client.receive_message(
            QueueUrl=self._queue, MaxNumberOfMessages=10, WaitTimeSeconds=5, MessageAttributeNames=["All"]
        )
        return [(message["ReceiptHandle"], message["Body"]) for message in answer.get("Messages", ())]

    async def acknowledge(self, messages: Read) -> None:
        entries = [{"Id": str(n), "ReceiptHandle": handle} for n, (handle, _) in enumerate(messages)]
        self._client.delete_message_batch(QueueUrl=self._queue, Entries=entries)

    def consumer(self, receiver: Any, **options: Any) -> Any:
        from effectonce.messaging import sqs

        return sqs.Consumer(self._client, self._queue, receiver=receiver, **options)


def _id_attribute(name: str) -> dict[str, Any]:
    return {"id": {"DataType": "String", "StringValue": name}}


class Confluent(Source):
    """A topic of one partition, by confluent-kafka."""

    async def open(self) -> None:
        from confluent_kafka import Producer
        from confluent_kafka.admin import AdminClient, NewTopic

        servers = {"bootstrap.servers": self.url.removeprefix("kafka://")}
        admin = AdminClient(servers)
        for made in admin.create_topics([NewTopic(self.name, 1, 1)]).values():
            made.result(30)
        self._configuration = {**servers, "group.id": GROUP + self.name}
        self._producer = Producer(servers)

    async def fill(self, messages: Sequence[tuple[str, bytes]]) -> None:
        for name, body in messages:
            self._producer.produce(self.name, body, headers=[("id", name.encode())])
        if self._producer.flush(30):
            raise AssertionError("Kafka did not take all messages")

    async def subscribe(self) -> None:
        from confluent_kafka import Consumer

        own = {"auto.offset.reset": "earliest", "enable.auto.commit": False}
        self._consumer: Any = Consumer({**self._configuration, **own})
        self._consumer.subscribe([self.name])

    async def read(self, most: int) -> Read:
        first = self._consumer.poll(WAIT_SECONDS)
        if first is None:
            return []
        return [(each, each.value()) for each in (first, *self._consumer.consume(most - 1, timeout=0))]

    async def acknowledge(self, messages: Read) -> None:
        self._consumer.commit(message=messages[-1][0], asynchronous=False)

    def consumer(self, receiver: Any, **options: Any) -> Any:
        from effectonce.messaging import kafka

        return kafka.Consumer(self._configuration, self.name, receiver=receiver, **options)


class AioKafka(Confluent):
    """The same by aiokafka."""

    awaits = True

    async def open(self) -> None:
        from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

        await super().open()
        servers = self._configuration["bootstrap.servers"]
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=servers,
            group_id=self._configuration["group.id"],
            enable_auto_commit=False,
            auto_offset_reset="earliest",
        )
        self._letters = AIOKafkaProducer(bootstrap_servers=servers)
        await self._consumer.start()
        await self._letters.start()

    async def subscribe(self) -> None:
        self._consumer.subscribe([self.name])

    async def read(self, most: int) -> Read:
        found = await self._consumer.getmany(timeout_ms=int(WAIT_SECONDS * 1000), max_records=most)
        return [(record, record.value) for records in found.values() for record in records]

    async def acknowledge(self, messages: Read) -> None:
        from aiokafka import TopicPartition

        last = messages[-1][0]
        await self._consumer.commit({TopicPartition(last.topic, last.partition): last.offset + 1})

    def consumer(self, receiver: Any, **options: Any) -> Any:
        from effectonce.messaging import kafka

        return kafka.Consumer(self._consumer, self.name, receiver=receiver, producer=self._letters, **options)

    async def close(self) -> None:
        await self._consumer.stop()
        await self._letters.stop()


SOURCES: dict[str, type[Source]] = {
    "redis-streams": RedisStreams,
    "redis-streams-asyncio": AsyncRedisStreams,
    "rabbitmq-pika": Pika,
    "rabbitmq-aio-pika": AioPika,
    "nats": Nats,
    "sqs": Sqs,
    "kafka-confluent": Confluent,
    "kafka-aiokafka": AioKafka,
}
