"""Brokers as senders and readers see them, for the tests of FastStream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import uuid4

from effectonce.testing.clocks import wait_until

WINDOW = 256
"""Messages that are on their way to a broker at once: each has to be confirmed within the client's patience."""


class Place:
    """A broker with a namespace of its own. ``handler`` is whom messages are for."""

    def __init__(self, url: str, handler: str) -> None:
        self.url, self.handler, self.queue = url, handler, f"q{uuid4().hex[:12]}"
        self.name = f"{self.queue}.{handler}"
        self.open()

    def open(self) -> None:
        """Connect, and make what has to be there."""

    def send(self, order: str | None, *, body: bytes | None = None, **headers: str) -> None:
        """A message with this id; None gives it none."""
        raise NotImplementedError

    def send_all(self, orders: list[str]) -> None:
        """A message for each."""
        for order in orders:
            self.send(order)

    def is_drained(self) -> bool:
        """Whether nothing waits for the handler."""
        raise NotImplementedError

    def letters(self) -> list[dict[str, str]]:
        """The headers of dead letters so far."""
        raise NotImplementedError

    def invoices(self) -> list[Any]:
        """What went on downstream so far."""
        raise NotImplementedError

    def close(self) -> None:
        """Disconnect."""


class OnRabbitMQ(Place):
    def open(self) -> None:
        import pika

        self._connection = pika.BlockingConnection(pika.URLParameters(self.url))
        self._channel = self._connection.channel()
        self._seen: dict[str, list[Any]] = {}
        for name in (self.name, f"{self.queue}.invoices"):
            self._channel.queue_declare(name, durable=True)

    def send(self, order: str | None, *, body: bytes | None = None, **headers: str) -> None:
        import pika

        data = json.dumps({"order": order}).encode() if body is None else body
        about = pika.BasicProperties(
            message_id=headers.pop("id", order), headers=headers, content_type="application/json"
        )
        self._channel.basic_publish("", self.name, data, about)

    def is_drained(self) -> bool:
        return not self._channel.queue_declare(self.name, passive=True).method.message_count

    def _taken(self, name: str) -> list[Any]:
        seen = self._seen.setdefault(name, [])
        self._channel.queue_declare(name, durable=True)
        while (message := self._channel.basic_get(name, auto_ack=True))[0]:
            seen.append(message)
        return seen

    def letters(self) -> list[dict[str, str]]:
        return [dict(about.headers) for _, about, _ in self._taken(f"{self.name}.dead")]

    def invoices(self) -> list[Any]:
        return [json.loads(body) for _, _, body in self._taken(f"{self.queue}.invoices")]

    def close(self) -> None:
        self._connection.close()


class OnKafka(Place):
    def open(self) -> None:
        from confluent_kafka import Producer
        from confluent_kafka.admin import AdminClient, NewTopic

        servers = {"bootstrap.servers": self.url.removeprefix("kafka://")}
        self._producer, self._servers = Producer(servers), servers
        names = (self.name, f"{self.queue}.invoices", f"{self.name}.dead")
        admin = AdminClient(servers)
        for future in admin.create_topics([NewTopic(name, 1, 1) for name in names]).values():
            future.result()

    def send(self, order: str | None, *, body: bytes | None = None, **headers: str) -> None:
        data = json.dumps({"order": order}).encode() if body is None else body
        about = {"content-type": "application/json", **headers}
        if order is not None:
            about.setdefault("id", order)
        self._producer.produce(
            self.name, data, headers=[(key, value.encode()) for key, value in about.items()]
        )
        self._producer.poll(0)

    def is_drained(self) -> bool:
        from confluent_kafka import Consumer, TopicPartition

        self._producer.flush()
        consumer = Consumer({**self._servers, "group.id": self.queue})
        try:
            (committed,) = consumer.committed([TopicPartition(self.name, 0)], timeout=10)
            _, last = _known(lambda: consumer.get_watermark_offsets(TopicPartition(self.name, 0), timeout=10))
        finally:
            consumer.close()
        return bool(committed.offset >= last)

    def _all(self, name: str) -> list[Any]:
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer({**self._servers, "group.id": uuid4().hex, "enable.auto.commit": False})
        found: list[Any] = []
        try:
            _, last = _known(lambda: consumer.get_watermark_offsets(TopicPartition(name, 0), timeout=10))
            consumer.assign([TopicPartition(name, 0, 0)])
            while len(found) < last:
                message = consumer.poll(1.0)
                if message is not None and message.error() is None:
                    found.append(message)
        finally:
            consumer.close()
        return found

    def letters(self) -> list[dict[str, str]]:
        return [
            {key: value.decode() for key, value in each.headers()} for each in self._all(f"{self.name}.dead")
        ]

    def invoices(self) -> list[Any]:
        return [json.loads(each.value()) for each in self._all(f"{self.queue}.invoices")]

    def close(self) -> None:
        self._producer.flush()


def _known(ask: Callable[[], Any]) -> Any:
    """What Kafka says of a topic, perhaps only when one that was just made has its leader."""
    from confluent_kafka import KafkaException

    answers: list[Any] = []

    def is_answered() -> bool:
        with suppress(KafkaException):
            answers.append(ask())
        return bool(answers)

    wait_until(is_answered)
    return answers[0]


class OnJetStream(Place):
    def open(self) -> None:
        import nats

        self._runner = asyncio.Runner()
        self._client: Any = self._runner.run(nats.connect(self.url))
        self._context: Any = self._client.jetstream()
        self._runner.run(
            self._context.add_stream(name=self.queue, subjects=[f"{self.queue}.>"], duplicate_window=0.1)
        )

    def send(self, order: str | None, *, body: bytes | None = None, **headers: str) -> None:
        data = json.dumps({"order": order}).encode() if body is None else body
        about = {"content-type": "application/json", **headers}
        name = about.pop("id", order)
        if name is not None:
            about["Nats-Msg-Id"] = name

        wait_until(lambda: self._is_taken(data, about))

    def _is_taken(self, data: bytes, headers: dict[str, str]) -> bool:
        return self._runner.run(self._taken(data, headers))

    async def _taken(self, data: bytes, headers: dict[str, str]) -> bool:
        """Whether the broker took a message: it drops a repetition that comes within its window."""
        answer = await self._context.publish(self.name, data, headers=headers)
        return not answer.duplicate

    def send_all(self, orders: list[str]) -> None:
        async def send(left: list[str]) -> None:
            while left:
                now, left = left[:WINDOW], left[WINDOW:]
                sent = [
                    self._taken(json.dumps({"order": order}).encode(), {"Nats-Msg-Id": order})
                    for order in now
                ]
                answers = await asyncio.gather(*sent)
                left += [order for order, taken in zip(now, answers, strict=True) if not taken]

        self._runner.run(send(orders))

    def is_drained(self) -> bool:
        from nats.js.errors import NotFoundError

        try:
            about = self._runner.run(self._context.consumer_info(self.queue, self.handler))
        except NotFoundError:
            return False
        return not about.num_pending + about.num_ack_pending

    def _all(self, subject: str) -> list[Any]:
        async def get() -> list[Any]:
            reader = await self._context.subscribe(subject, ordered_consumer=True)
            found: list[Any] = []
            try:
                while True:
                    found.append(await reader.next_msg(timeout=0.3))
            except TimeoutError:
                await reader.unsubscribe()
            return found

        return self._runner.run(get())

    def letters(self) -> list[dict[str, str]]:
        return [dict(each.headers) for each in self._all(f"{self.queue}.dead")]

    def invoices(self) -> list[Any]:
        return [json.loads(each.data) for each in self._all(f"{self.queue}.invoices")]

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


PLACES = {"rabbitmq": OnRabbitMQ, "kafka": OnKafka, "nats": OnJetStream}
