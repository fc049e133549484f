"""Kafka through confluent-kafka, with a client that is made here."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from ..errors import MissingExtra, UsageError
from ._delivery import DeadLetter, Delivery, Verdict, labels
from ._kafka import DEFAULT_POLL_SECONDS, Pauses, Place, Record, delivery_of, plan

try:
    import confluent_kafka as kafka
    from confluent_kafka import KafkaError, KafkaException, TopicPartition
except ImportError as error:
    raise MissingExtra("Kafka needs the package confluent-kafka: pip install effectonce[kafka]") from error

DELIVERY_SECONDS = 30.0
OF_CONSUMERS = (
    "group.",
    "enable.auto.",
    "auto.",
    "fetch.",
    "max.poll.",
    "session.",
    "heartbeat.",
    "partition.",
    "isolation.",
)
"""What a consumer's configuration has and a producer's has not."""


class Confluent:
    """A member of a group, as the loop sees it. The lock is for the heartbeat, which polls beside the handlers."""

    awaits = False
    away: tuple[type[Exception], ...] = (KafkaException, OSError)

    def __init__(self, configuration: dict[str, Any], topics: list[str], dead: str, wanted: Any) -> None:
        for name in ("enable.auto.commit", "enable.auto.offset.store"):
            if str(configuration.get(name, "false")).lower() != "false":
                raise UsageError(
                    f"{name} would commit what is not done yet. Leave it out: offsets are committed here."
                )
        if "group.id" not in configuration:
            raise UsageError('The configuration has no "group.id", which names who consumes.')
        self.group = str(configuration["group.id"])
        own = {"enable.auto.commit": False, "enable.auto.offset.store": False}
        self._configuration = {"auto.offset.reset": "earliest", **configuration, **own}
        self._topics, self._dead, self._wanted = topics, dead, wanted
        poll_ms = float(configuration.get("max.poll.interval.ms", DEFAULT_POLL_SECONDS * 1000))
        self.deadline: float | None = poll_ms / 1000
        self._consumer: Any = None
        self._producer: Any = None
        self._pauses, self._assigned = Pauses(), set[Place]()
        self._is_parked = False
        self._lock = threading.Lock()

    async def open(self) -> None:
        await self.close()
        with self._lock:
            self._pauses, self._assigned, self._is_parked = Pauses(), set(), False
            self._consumer = kafka.Consumer(self._configuration)
            self._consumer.subscribe(
                self._topics, on_assign=self._take, on_revoke=self._give, on_lost=self._give
            )

    def _take(self, _: Any, partitions: list[TopicPartition]) -> None:
        self._assigned |= {Place(each.topic, each.partition) for each in partitions}

    def _give(self, _: Any, partitions: list[TopicPartition]) -> None:
        given = {Place(each.topic, each.partition) for each in partitions}
        self._assigned -= given
        self._pauses.forget(given)

    async def fetch(self, most: int) -> Sequence[Delivery]:
        now = time.monotonic()
        with self._lock:
            due = self._pauses.due(now)
            if self._is_parked:
                due, self._is_parked = list(self._assigned - self._pauses.resting()), False
            if due:
                self._consumer.resume([_at(place) for place in due])
            first = self._consumer.poll(self._pauses.wait(now))
            if first is None:
                return ()
            # What has arrived already: to wait for more would hold up the first.
            found = [first, *self._consumer.consume(most - 1, timeout=0)] if most > 1 else [first]
        return [
            delivery_of(self._record(message), self._wanted) for message in found if self._is_record(message)
        ]

    def _is_record(self, message: Any) -> bool:
        error = message.error()
        if error is None:
            return True
        if error.code() == KafkaError._PARTITION_EOF:
            return False
        raise KafkaException(error)

    def _record(self, message: Any) -> Record:
        kind, milliseconds = message.timestamp()
        sent = None if kind == kafka.TIMESTAMP_NOT_AVAILABLE else milliseconds / 1000
        place = Place(message.topic(), message.partition())
        headers = message.headers() or ()
        return Record(place, message.offset(), message.key(), message.value(), headers, sent)

    async def settle(self, settled: Sequence[tuple[Delivery, Verdict]]) -> None:
        planned = plan(settled)
        self._put_aside(planned.letters)
        now = time.monotonic()
        with self._lock:
            done = [
                _at(place, offset) for place, offset in planned.commits.items() if place in self._assigned
            ]
            if done:
                self._consumer.commit(offsets=done, asynchronous=False)
            for place, (offset, delay) in planned.again.items():
                if place in self._assigned:
                    self._consumer.seek(_at(place, offset))
                    self._consumer.pause([_at(place)])
                    self._pauses.rest(place, now + delay)

    def _put_aside(self, letters: list[tuple[Delivery, DeadLetter]]) -> None:
        if not letters:
            return
        if self._producer is None:
            mine = {k: v for k, v in self._configuration.items() if not k.startswith(OF_CONSUMERS)}
            self._producer = kafka.Producer(mine)
        troubles: list[Any] = []

        def told(error: Any, _: Any) -> None:
            if error is not None:
                troubles.append(error)

        for delivery, letter in letters:
            record: Record = delivery.handle
            headers: list[Any] = [*record.headers, *labels(letter, delivery).items()]
            topic = self._dead or f"{record.place.topic}.dead"
            self._producer.produce(topic, record.value, record.key, headers=headers, on_delivery=told)
        left = self._producer.flush(DELIVERY_SECONDS)
        if left or troubles:
            raise KafkaException(troubles[0] if troubles else KafkaError(KafkaError._TIMED_OUT))

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """Ask for something, so that the group sees that we live; but for nothing that we would have to take."""
        with self._lock:
            if not self._is_parked and self._assigned:
                self._consumer.pause([_at(place) for place in self._assigned])
                self._is_parked = True
            message = self._consumer.poll(0)
            if message is not None and message.error() is None:
                self._consumer.seek(TopicPartition(message.topic(), message.partition(), message.offset()))

    async def close(self) -> None:
        """Leave the group: its other members get the partitions at once."""
        with self._lock:
            consumer, self._consumer = self._consumer, None
            if consumer is not None:
                consumer.close()


def _at(place: Place, offset: int = kafka.OFFSET_INVALID) -> TopicPartition:
    return TopicPartition(place.topic, place.partition, offset)
