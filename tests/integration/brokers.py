"""Topics of every broker, and what is in them, for the tests of publishers and of the launcher."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import uuid4

from effectonce.outbox import Event, Publisher, Results
from effectonce.testing.clocks import wait_until

Got = tuple[str, str | None, bytes, str | None]
"""What a consumer sees: id, key, payload, and the header "trace"."""


def event(number: int, topic: str, key: str | None = None, payload: bytes = b"", **headers: str) -> Event:
    return Event(number, f"e-{number}", topic, key, payload or str(number).encode(), headers, 1, 0.0)


def published(publisher: Publisher, events: Sequence[Event]) -> Results:
    """Publish once and close."""
    publish: Any = publisher.publish

    async def main() -> Results:
        try:
            results: Results = await publish(events)
            return results
        finally:
            closing: Any = publisher.close()
            await closing

    if asyncio.iscoroutinefunction(publish):
        return asyncio.run(main())
    results: Results = publish(events)
    publisher.close()
    return results


class Place:
    """A topic of a broker, and what is in it. Each kind of broker has its own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.topic = f"t-{uuid4().hex}"
        self.make()

    def make(self) -> None:
        """Make the topic."""

    def got(self, count: int) -> list[Got]:
        """Everything in the topic, once there are that many."""
        raise NotImplementedError

    def payloads(self) -> list[bytes]:
        """All payloads there are, in order, repetitions too."""
        raise NotImplementedError

    def poison(self) -> Event:
        """An event that the broker refuses."""
        raise NotImplementedError


class OnRedis(Place):
    @property
    def client(self) -> Any:
        import redis

        return redis.Redis.from_url(self.url.replace("valkey", "redis"))

    def got(self, count: int) -> list[Got]:
        with self.client as client:
            entries = [entry for _, entry in client.xrange(self.topic)]
        assert len(entries) == count
        return [
            (
                entry[b"id"].decode(),
                entry[b"key"].decode() if b"key" in entry else None,
                entry[b"payload"],
                json.loads(entry.get(b"headers", b"{}")).get("trace"),
            )
            for entry in entries
        ]

    def payloads(self) -> list[bytes]:
        with self.client as client:
            return [entry[b"payload"] for _, entry in client.xrange(self.topic)]

    def poison(self) -> Event:
        """A topic whose name is taken by something that is no stream."""
        with self.client as client:
            client.set(f"{self.topic}-text", "x")
        return event(3, f"{self.topic}-text", "k3")


class OnRabbitMQ(Place):
    def make(self) -> None:
        asyncio.run(self._with_channel(lambda channel: channel.queue_declare(self.topic, durable=True)))

    async def _with_channel(self, use: Callable[[Any], Any]) -> Any:
        import aiormq

        connection = await aiormq.connect(self.url)
        try:
            return await use(await connection.channel())
        finally:
            await connection.close()

    def got(self, count: int) -> list[Got]:
        async def take(channel: Any) -> list[Any]:
            return [await channel.basic_get(self.topic, no_ack=True) for _ in range(count + 1)]

        *messages, end = asyncio.run(self._with_channel(take))
        assert end.delivery_tag is None
        return [
            (
                message.header.properties.message_id,
                (message.header.properties.headers or {}).get("key"),
                message.body,
                (message.header.properties.headers or {}).get("trace"),
            )
            for message in messages
        ]

    def payloads(self) -> list[bytes]:
        async def take(channel: Any) -> list[bytes]:
            taken = []
            while (message := await channel.basic_get(self.topic, no_ack=True)).delivery_tag is not None:
                taken.append(message.body)
            return taken

        taken: list[bytes] = asyncio.run(self._with_channel(take))
        return taken

    def poison(self) -> Event:
        """No queue would get it."""
        return event(3, f"{self.topic}-nowhere", "k3")


class OnNats(Place):
    def make(self) -> None:
        asyncio.run(self._with_stream(lambda js: js.add_stream(name=self.topic, subjects=[self.topic])))

    async def _with_stream(self, use: Callable[[Any], Any]) -> Any:
        import nats

        client = await nats.connect(self.url)
        try:
            return await use(client.jetstream())
        finally:
            await client.close()

    def got(self, count: int) -> list[Got]:
        async def take(js: Any) -> list[Any]:
            assert (await js.stream_info(self.topic)).state.messages == count
            subscription = await js.subscribe(self.topic, ordered_consumer=True)
            return [await subscription.next_msg() for _ in range(count)]

        messages = asyncio.run(self._with_stream(take))
        return [
            (m.headers["Nats-Msg-Id"], m.headers.get("key"), m.data, m.headers.get("trace")) for m in messages
        ]

    def payloads(self) -> list[bytes]:
        async def take(js: Any) -> list[bytes]:
            count = (await js.stream_info(self.topic)).state.messages
            subscription = await js.subscribe(self.topic, ordered_consumer=True)
            return [(await subscription.next_msg()).data for _ in range(count)]

        taken: list[bytes] = asyncio.run(self._with_stream(take))
        return taken

    def poison(self) -> Event:
        """No stream takes it."""
        return event(3, f"{self.topic}-nowhere", "k3")


class OnKafka(Place):
    def got(self, count: int) -> list[Got]:
        from confluent_kafka import Consumer

        settings = {"bootstrap.servers": self.url.removeprefix("kafka://"), "group.id": uuid4().hex}
        consumer = Consumer({**settings, "auto.offset.reset": "earliest"})
        consumer.subscribe([self.topic])
        messages: list[Any] = []
        wait_until(
            lambda: messages.extend(consumer.consume(count, 0.1)) or len(messages) >= count, seconds=60
        )
        consumer.close()
        seen = []
        for message in messages:
            headers = dict(message.headers())
            key, trace = message.key(), headers.get("trace")
            seen.append(
                (headers["id"].decode(), key and key.decode(), message.value(), trace and trace.decode())
            )
        return sorted(seen)

    def payloads(self) -> list[bytes]:
        return [payload for _, _, payload, _ in self.got(1)]

    def poison(self) -> Event:
        return event(3, self.topic, "k3", b"x" * 2_000_000)


class OnSQS(Place):
    suffix = ""

    def make(self) -> None:
        self.topic += self.suffix
        attributes = {"FifoQueue": "true"} if self.suffix else {}
        self._url = self.client.create_queue(QueueName=self.topic, Attributes=attributes)["QueueUrl"]

    @property
    def client(self) -> Any:
        import boto3

        return boto3.client(
            "sqs", region_name="eu-central-1", endpoint_url=self.url.partition("endpoint=")[2]
        )

    def got(self, count: int) -> list[Got]:
        messages: list[Any] = []
        while found := self.client.receive_message(
            QueueUrl=self._url, MaxNumberOfMessages=10, MessageAttributeNames=["All"]
        ).get("Messages"):
            messages += found
            for message in found:
                self.client.delete_message(QueueUrl=self._url, ReceiptHandle=message["ReceiptHandle"])
        assert len(messages) == count
        seen = []
        for message in messages:
            values = {name: value["StringValue"] for name, value in message["MessageAttributes"].items()}
            seen.append((values["id"], values.get("key"), message["Body"].encode(), values.get("trace")))
        return sorted(seen)

    def poison(self) -> Event:
        """There is no such queue."""
        return event(3, f"nowhere{self.suffix}", "k3")


class OnFifo(OnSQS):
    suffix = ".fifo"


class OnWebhook(Place):
    def make(self) -> None:
        seen: list[Got] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = int(self.path.rpartition("-")[2]) if "status" in self.path else 200
                if status == 200:
                    id = self.headers["Idempotency-Key"].strip('"')
                    seen.append((id, self.headers["Effectonce-Key"], body, self.headers["trace"]))
                self.send_response(status)
                self.send_header("Content-Length", "4")
                self.end_headers()
                self.wfile.write(b"text")

            def log_message(self, *_: object) -> None:
                """Nobody reads it."""

        self.seen = seen
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/hooks/{{topic}}"

    def got(self, count: int) -> list[Got]:
        assert len(self.seen) == count
        return sorted(self.seen)

    def poison(self) -> Event:
        return event(3, "status-422", "k3")


BROKERS: dict[str, type[Place]] = {
    "valkey": OnRedis,
    "rabbitmq": OnRabbitMQ,
    "nats": OnNats,
    "kafka": OnKafka,
    "sqs": OnSQS,
}
