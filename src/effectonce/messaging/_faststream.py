"""A message as FastStream hands it over, on each of its brokers: where its stable id is, and where it is put aside.

FastStream gives every message an id, but not one to rely on: its Kafka ids lack topic and partition, its RabbitMQ ids
are made up on each delivery where the sender gave none, and its NATS ids ignore ``Nats-Msg-Id``. So ids are looked for
in the client's own message, as the consumers of these brokers do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import chain, count
from typing import Any, Final

from ..errors import UsageError
from . import _amqp, _kafka
from ._delivery import EXTEND_SHARE, DeadLetter, Delivery, candidates, or_place
from ._letters import LEAST_ROOM, labels
from ._options import comes_back

LONGEST_HOLD: Final = 60.0
"""For how long a message is held back here at most where its broker can't put it off."""
MSG_ID: Final = "Nats-Msg-Id"


class Kind:
    """One kind of broker."""

    def delivery(self, message: Any, subscriber: Any, wanted: Any) -> Delivery:
        """The message in the words of all brokers."""
        raise NotImplementedError

    async def group(self, message: Any, subscriber: Any) -> str:
        """Who consumes, where several may get the same message: each has its own effect."""
        return ""

    async def place_apart(self, message: Any, delivery: Delivery, wanted: str) -> str:
        """Where dead letters go: as is wanted, or as is usual. Raises if they would come back."""
        if wanted == delivery.source:
            raise comes_back(wanted)
        return wanted or f"{delivery.source}.dead"

    async def put_aside(self, broker: Any, delivery: Delivery, letter: DeadLetter, where: str) -> None:
        """Publish what can't be processed, with the reason."""
        raise NotImplementedError

    async def put_off(self, delay: float) -> Mapping[str, Any]:
        """Let a pause pass, or say in the options of a nack how long it is."""
        await asyncio.sleep(min(delay, LONGEST_HOLD))
        return {}

    @asynccontextmanager
    async def kept(self, message: Any) -> AsyncIterator[None]:
        """Have the broker wait while the handler runs."""
        yield


class RabbitMQ(Kind):
    """Ids are the property ``message_id``, else the header ``id``."""

    def __init__(self) -> None:
        self._declared: set[str] = set()

    def delivery(self, message: Any, subscriber: Any, wanted: Any) -> Delivery:
        raw = message.raw_message
        return _amqp.delivery_of(
            message,
            subscriber.queue.add_prefix(subscriber._outer_config.prefix).name,
            wanted,
            message_id=raw.message_id,
            headers=raw.headers,
            timestamp=None if raw.timestamp is None else raw.timestamp.timestamp(),
            body=message.body,
            redelivered=bool(raw.redelivered),
        )

    async def put_aside(self, broker: Any, delivery: Delivery, letter: DeadLetter, where: str) -> None:
        from faststream.rabbit import RabbitQueue

        if where not in self._declared:
            await broker.declare_queue(RabbitQueue(where, durable=True))
            self._declared.add(where)
        raw = delivery.handle.raw_message
        for headers, body in _amqp.letters_of(raw.headers, labels(letter, delivery), delivery.body):
            await broker.publish(
                body,
                where,
                headers=headers,
                content_type=raw.content_type,
                message_id=raw.message_id,
                persist=True,
            )


class Kafka(Kind):
    """Ids are the header ``id``, else partition and offset."""

    def delivery(self, message: Any, subscriber: Any, wanted: Any) -> Delivery:
        return _kafka.delivery_of(_record(message.raw_message), wanted)

    async def group(self, message: Any, subscriber: Any) -> str:
        return str(subscriber.group_id or "")

    async def put_aside(self, broker: Any, delivery: Delivery, letter: DeadLetter, where: str) -> None:
        record: _kafka.Record = delivery.handle
        told, largest = labels(letter, delivery), _kafka.ANY_SIZE
        while True:
            try:
                for value, headers in _kafka.pieces(record, told, largest):
                    await broker.publish(value, where, key=record.key, headers=_carried(headers))
                return
            except Exception as error:
                # One that can't be put aside would stop its partition. How much is taken is the client's, the topic's
                # and the broker's to say.
                if _kafka.code_of(error) != _kafka.TOO_LARGE or largest <= LEAST_ROOM:
                    raise
                largest = min(largest, len(record.value or b"") + _kafka.size_of(record.headers)) // 2


class JetStream(Kind):
    """Ids are ``Nats-Msg-Id``, else the place in the stream."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str, str], str] = {}
        self._configs: dict[tuple[str, str], Any] = {}

    def delivery(self, message: Any, subscriber: Any, wanted: Any) -> Delivery:
        raw, about = message.raw_message, _metadata(message)
        headers = raw.headers or {}
        usual = or_place(f"the header {MSG_ID}", headers.get(MSG_ID), about.stream, about.sequence.stream)
        ids = candidates(wanted, message, headers.get, usual)
        sent, times = about.timestamp.timestamp(), about.num_delivered
        return Delivery(message, about.stream, ids, message.body, len(message.body), sent, times)

    async def place_apart(self, message: Any, delivery: Delivery, wanted: str) -> str:
        """The same, where the consumer may be given it with others of its stream; and there is a stream that has it."""
        about = _metadata(message)
        whose = (about.stream, about.consumer, wanted)
        if whose not in self._places:
            from .nats import place_apart

            context, config = message.raw_message._client.jetstream(), await self._config(message)
            self._places[whose] = await place_apart(context, about.stream, config, wanted)
        return self._places[whose]

    async def put_aside(self, broker: Any, delivery: Delivery, letter: DeadLetter, where: str) -> None:
        from .nats import put_aside

        raw = delivery.handle.raw_message
        await put_aside(raw._client.jetstream(), where, raw, delivery, letter)

    async def group(self, message: Any, subscriber: Any) -> str:
        """Its durable name; one that is not durable has another name each time."""
        return str((await self._config(message)).durable_name or "")

    async def put_off(self, delay: float) -> Mapping[str, Any]:
        return {"delay": delay}

    @asynccontextmanager
    async def kept(self, message: Any) -> AsyncIterator[None]:
        config = await self._config(message)
        wait = min([config.ack_wait or 30.0, *(config.backoff or ())])

        async def beat() -> None:
            while True:
                await asyncio.sleep(wait / EXTEND_SHARE)
                with suppress(Exception):  # a delivery that comes again is absorbed
                    await message.in_progress()

        beating = asyncio.ensure_future(beat())
        try:
            yield
        finally:
            beating.cancel()

    async def _config(self, message: Any) -> Any:
        about = _metadata(message)
        consumer = (about.stream, about.consumer)
        if consumer not in self._configs:
            info = await message.raw_message._client.jetstream().consumer_info(*consumer)
            self._configs[consumer] = info.config
        return self._configs[consumer]


KINDS: Final = {
    "faststream.rabbit": RabbitMQ,
    "faststream.kafka": Kafka,
    "faststream.confluent": Kafka,
    "faststream.nats": JetStream,
}


def name_result(command: Any, id: str) -> None:
    """Give what is about to be published an id where consumers look for one, unless it has one."""
    package = type(command).__module__.removeprefix("faststream.").partition(".")[0]
    if package == "rabbit":
        if not command.message_options.get("message_id"):
            command.message_options["message_id"] = id
    elif package in ("kafka", "confluent", "nats") and len(getattr(command, "batch_bodies", ())) < 2:
        # A batch shares its headers: records with one id would be taken for one.
        command.headers = {MSG_ID if package == "nats" else "id": id, **(command.headers or {})}


def kind_of(message: Any) -> type[Kind]:
    """What kind of broker a message is from."""
    if isinstance(message.raw_message, tuple | list):
        raise UsageError(
            "This subscriber takes batches, and a batch has no id of its own: another delivery may cut it differently. "
            "Take single messages, or use the consumers of effectonce.messaging, which claim batches together."
        )
    for each in type(message).__mro__:
        if found := KINDS.get(each.__module__.rpartition(".")[0]):
            return found
    raise UsageError(
        f"{type(message).__name__}: messages are protected on RabbitMQ, Kafka and NATS JetStream. Others have no "
        "stable id, or can't be given back."
    )


async def give_back(message: Any) -> None:
    """Have a message delivered again that was not looked at, also where FastStream takes it for acknowledged."""
    with suppress(Exception):
        raw, consumer = message.raw_message, getattr(message, "consumer", None)
        if consumer is None:
            await message.nack()
        elif hasattr(message, "is_manual"):  # confluent-kafka
            await consumer.seek(topic=raw.topic(), partition=raw.partition(), offset=raw.offset())
        else:
            from aiokafka import TopicPartition  # type: ignore[import-untyped]

            consumer.seek(partition=TopicPartition(raw.topic, raw.partition), offset=raw.offset)


def _metadata(message: Any) -> Any:
    from nats.errors import NotJSMessageError

    try:
        return message.raw_message.metadata
    except NotJSMessageError as error:
        raise UsageError(
            "Core NATS delivers once or never, so there is nothing to give back. Subscribe to a stream: "
            "@broker.subscriber(subject, stream=..., durable=...)."
        ) from error


def _record(raw: Any) -> _kafka.Record:
    """A record of aiokafka, which has attributes, or of confluent-kafka, which has methods."""
    if hasattr(raw, "error"):
        kind, milliseconds = raw.timestamp()
        sent = milliseconds / 1000 if kind else None
        place = _kafka.Place(raw.topic(), raw.partition())
        return _kafka.Record(place, raw.offset(), raw.key(), raw.value(), raw.headers() or (), sent)
    sent = raw.timestamp / 1000 if raw.timestamp is not None and raw.timestamp >= 0 else None
    place = _kafka.Place(raw.topic, raw.partition)
    return _kafka.Record(place, raw.offset, raw.key, raw.value, raw.headers, sent)


def _carried(headers: Sequence[tuple[str, bytes | None]]) -> dict[str, str]:
    """The headers of a record as FastStream takes them: of one name the last keeps it, and those before have a number.

    All are text: a record with any other FastStream can't read at all. One without a value becomes an empty one.
    """
    carried: dict[str, str] = {}
    for name, value in reversed(headers):
        names = chain([name], (f"{name}.{number}" for number in count(2)))
        free = next(each for each in names if each not in carried)
        carried[free] = (value or b"").decode("utf-8", "replace")
    return carried
