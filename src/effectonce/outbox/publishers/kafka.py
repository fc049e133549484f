"""Kafka: an event is a record of the topic that its topic names, partitioned by its key, with its id as header ``id``.

The producer is idempotent, so its own retries neither double nor reorder. What a relay sends again comes twice, with
the same id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self
from urllib.parse import parse_qsl

from ...errors import MissingExtra
from ...stores._urls import split
from .._events import Event, Results, Unsent

try:
    from confluent_kafka import KafkaError, KafkaException, Producer
except ImportError as error:
    raise MissingExtra("Kafka needs the package confluent-kafka: pip install effectonce[kafka]") from error

TIMEOUT_SECONDS = 10.0
OWN_FAULT = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.INVALID_MSG,
    KafkaError.INVALID_RECORD,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._INVALID_ARG,
}
"""Errors that another try at the same record would meet again."""


class Kafka:
    """Publishes to a Kafka cluster. Options are those of librdkafka, such as ``{"security.protocol": "SASL_SSL"}``."""

    keeps_order = False

    def __init__(self, servers: str, **options: Any) -> None:
        self._settings = {
            "linger.ms": 2,
            "message.timeout.ms": int(TIMEOUT_SECONDS * 1000),
            **options,
            "bootstrap.servers": servers,
            "enable.idempotence": True,
        }
        self._producer: Any = None

    @classmethod
    def from_url(cls, url: str) -> Self:
        """``kafka://host:9092,host:9093?security.protocol=SSL``."""
        parts = split(url)
        return cls(parts.netloc, **dict(parse_qsl(parts.query)))

    def publish(self, events: Sequence[Event]) -> Results:
        """Hand all events to the producer, then wait for its reports."""
        if self._producer is None:
            self._producer = Producer(self._settings)
        results: list[Exception | None] = [Unsent("Kafka did not confirm it in time.")] * len(events)
        for number, event in enumerate(events):
            self._produce(number, event, results)
        left = self._producer.flush(TIMEOUT_SECONDS + 2)
        if left or any(isinstance(result, Unsent) for result in results):
            self.close()  # nothing of it may be sent later, when others may have sent what comes after it
        return results

    def _produce(self, number: int, event: Event, results: list[Exception | None]) -> None:
        def report(error: KafkaError | None, _: object) -> None:
            results[number] = None if error is None else _meaning(error)

        headers: list[tuple[str, str | bytes | None]] = [("id", event.id), *event.headers.items()]
        key = None if event.key is None else event.key.encode()
        while True:
            try:
                self._producer.produce(event.topic, event.payload, key, headers=headers, on_delivery=report)
                return
            except BufferError:  # its queue is full; reports make room
                self._producer.poll(0.1)
            except KafkaException as error:
                results[number] = _meaning(error.args[0])
                return

    def close(self) -> None:
        """Drop what is still on its way, and the producer."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()
            producer.flush(1)


def _meaning(error: KafkaError) -> Exception:
    if error.code() in OWN_FAULT:
        return KafkaException(error)
    return Unsent(f"Kafka: {error.str()}")
