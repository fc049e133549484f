"""Amazon SQS: a consumer of a standard or FIFO queue whose messages are deleted when their effects are recorded.

::

    consumer = sqs.Consumer(boto3.client("sqs"), queue_url, receiver=receiver)
    consumer.run(handler)

A message's id is its attribute ``id``, else its MessageDeduplicationId, else its MessageId, which SQS gives it when it
is sent: that one tells deliveries of one message, not a sender's second try. While handlers run, the visibility of
their messages is extended; a pause before another delivery is a shorter or longer visibility, in whole seconds.

In a FIFO queue the messages of a group are handled in order, and a group stops at its first failure: what comes after
it becomes visible together with it. What can't be processed is sent to the queue ``dead_letter``, with the reason in
its attributes, and then deleted; that queue is made when it is missing. What is too large together with the reason is
sent in parts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from .._durations import Duration, seconds
from ..errors import MissingExtra, UsageError
from . import _consumer
from ._consumer import Options
from ._delivery import Ack, DeadLetter, Delivery, Nack, Verdict, candidates
from ._letters import labels
from ._options import check

try:
    from botocore.exceptions import (  # type: ignore[import-untyped]
        BotoCoreError,
        ClientError,
        NoCredentialsError,
        NoRegionError,
        ParamValidationError,
        PartialCredentialsError,
    )
except ImportError as error:
    raise MissingExtra("SQS needs the package boto3: pip install effectonce[sqs]") from error

if TYPE_CHECKING:
    from .._receiver import Receiver

T = TypeVar("T")

AT_ONCE = 10
"""Messages of one request, and attributes of one message: SQS takes no more."""
ASKED = [
    "ApproximateReceiveCount",
    "MessageDeduplicationId",
    "MessageGroupId",
    "SentTimestamp",
    "SequenceNumber",
]
"""What SQS is asked to tell of a message: what is needed here, and what an ``id=`` might go by."""
LONGEST_VISIBILITY = 43_200
LEAST_ROOM, ROOM_FOR_PART = 262_144, 256
"""Bytes that every queue takes at once unless it is told otherwise, and what it takes to tell of a part."""

REFUSALS = {
    "AWS.SimpleQueueService.NonExistentQueue",
    "QueueDoesNotExist",
    "AccessDenied",
    "AccessDeniedException",
    "AuthFailure",
    "InvalidAddress",
    "InvalidClientTokenId",
    "InvalidSecurity",
    "KmsAccessDenied",
    "KMS.AccessDeniedException",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
    "UnsupportedOperation",
}
"""Codes of errors that no other try mends."""

log = logging.getLogger("effectonce.messaging")


class Consumer(_consumer.Consumer):
    """Handles each message of a queue once.

    client        ``boto3.client("sqs")``
    queue         its URL
    visibility    how long a message is nobody else's without being extended
    wait          how long a request waits for messages; ``stop`` may take as long
    dead_letter   the URL of the queue for what can't be processed; by default the queue's name with ``-dead``
    options       see ``Options``
    """

    def __init__(
        self,
        client: Any,
        queue: str,
        *,
        receiver: Receiver,
        visibility: Duration = "1m",
        wait: Duration = "20s",
        dead_letter: str = "",
        **options: Unpack[Options],
    ) -> None:
        check(receiver, options, dead_letter, queue=queue)
        if not hasattr(client, "receive_message"):
            raise UsageError(f'A {type(client).__name__} is no client of SQS. Write boto3.client("sqs").')
        broker = _Queue(client, queue, seconds(visibility, "visibility"), seconds(wait, "wait"), dead_letter)
        broker.id = options.get("id")
        super().__init__(broker, receiver, options)


class _Queue:
    """A queue, as the loop sees it."""

    awaits = False
    away: tuple[type[Exception], ...] = (BotoCoreError, ClientError)
    is_let_in = True
    group = ""
    id: Any = None

    def __init__(self, client: Any, url: str, visibility: float, wait: float, dead: str) -> None:
        if not 1 <= visibility <= LONGEST_VISIBILITY or not 1 <= wait <= 20:
            raise UsageError(f"visibility={visibility} must be 1 s to 12 h, and wait={wait} 1 s to 20 s.")
        self._client, self._url, self._dead = client, url, dead
        self._name = url.rstrip("/").rpartition("/")[2]
        self._is_fifo = self._name.endswith(".fifo")
        self._visibility, self._wait = int(visibility), int(wait)
        self.deadline: float | None = float(self._visibility)

    def refuses(self, error: Exception) -> bool:
        """Not for a token that has expired: whoever renews it may be late."""
        if isinstance(error, ClientError):
            return str(error.response.get("Error", {}).get("Code", "")) in REFUSALS
        return isinstance(
            error, NoCredentialsError | PartialCredentialsError | NoRegionError | ParamValidationError
        )

    async def open(self) -> None:
        if self._dead:
            return
        name = f"{self._name.removesuffix('.fifo')}-dead" + (".fifo" if self._is_fifo else "")
        try:
            self._dead = self._client.get_queue_url(QueueName=name)["QueueUrl"]
        except self._client.exceptions.QueueDoesNotExist:
            attributes = {"FifoQueue": "true"} if self._is_fifo else {}
            self._dead = self._client.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]

    async def fetch(self, most: int) -> Sequence[Delivery]:
        found: list[Delivery] = []
        while len(found) < most:
            wanted = min(most - len(found), AT_ONCE)
            answer = self._client.receive_message(
                QueueUrl=self._url,
                MaxNumberOfMessages=wanted,
                WaitTimeSeconds=0 if found else self._wait,
                VisibilityTimeout=self._visibility,
                AttributeNames=ASKED,
                MessageAttributeNames=["All"],
            )
            messages = answer.get("Messages", [])
            found += map(self._delivery, messages)
            if len(messages) < wanted:
                break
        return found

    def _delivery(self, message: dict[str, Any]) -> Delivery:
        about, own = message.get("Attributes", {}), message.get("MessageAttributes", {})
        usual = (
            ("the attribute id", _value(own.get("id"))),
            ("MessageDeduplicationId", about.get("MessageDeduplicationId")),
            ("MessageId", message.get("MessageId")),
        )
        ids = candidates(self.id, message, lambda name: _value(own.get(name)), usual)
        body = message["Body"].encode("utf-8", "surrogatepass")  # what is no text is found out by decoding it
        sent = int(about["SentTimestamp"]) / 1000 if "SentTimestamp" in about else None
        times = int(about.get("ApproximateReceiveCount", 1))
        group = about.get("MessageGroupId") if self._is_fifo else None
        return Delivery(message, self._name, ids, body, len(body), sent, times, group)

    async def settle(self, settled: Sequence[tuple[Delivery, Verdict]]) -> None:
        self._delete([delivery for delivery, verdict in settled if isinstance(verdict, Ack)])
        pauses = self._pauses(settled)
        later = [delivery for delivery, verdict in settled if isinstance(verdict, Nack)]
        self._change_visibility(later, lambda delivery: pauses[_group_of(delivery)])
        # Last: a letter that can't be sent must not keep others from being settled.
        letters = [(each, verdict) for each, verdict in settled if isinstance(verdict, DeadLetter)]
        self._put_aside([entry for each in letters for entry in self._letter(*each)])
        self._delete([delivery for delivery, _ in letters])

    def _put_aside(self, entries: Sequence[dict[str, Any]]) -> None:
        for some in _loads(entries, self._room):
            numbered = [{"Id": str(number), **entry} for number, entry in enumerate(some)]
            answer = self._client.send_message_batch(QueueUrl=self._dead, Entries=numbered)
            if answer.get("Failed"):  # then none is deleted: they come again, and are put aside then
                raise ClientError({"Error": answer["Failed"][0]}, "SendMessageBatch")

    @cached_property
    def _room(self) -> int:
        """How many bytes the queue for dead letters takes at once. Whoever may not ask knows the least."""
        try:
            answer = self._client.get_queue_attributes(
                QueueUrl=self._dead, AttributeNames=["MaximumMessageSize"]
            )
            return int(answer["Attributes"]["MaximumMessageSize"])
        except (ClientError, KeyError):
            return LEAST_ROOM

    def _delete(self, deliveries: Sequence[Delivery]) -> None:
        self._many(self._client.delete_message_batch, deliveries, lambda _: {})

    def _pauses(self, settled: Sequence[tuple[Delivery, Verdict]]) -> dict[Any, int]:
        """How long messages stay invisible. Those of one group come back together, and so in order."""
        pauses: dict[Any, int] = {}
        for delivery, verdict in settled:
            if isinstance(verdict, Nack):
                pause = min(ceil(verdict.delay), LONGEST_VISIBILITY)
                pauses[_group_of(delivery)] = max(pause, pauses.get(_group_of(delivery), 0))
        return pauses

    def _letter(self, delivery: Delivery, letter: DeadLetter) -> Iterator[dict[str, Any]]:
        """What to send: mostly one, and parts of a message that is too large together with what is told of it."""
        message = delivery.handle
        own = message.get("MessageAttributes", {})
        told = labels(letter, delivery)
        if len(own) + len(told) >= AT_ONCE:  # one more says which part it is
            told["dead-attributes"], own = (
                json.dumps({name: _value(own[name]) for name in own}, default=repr),
                {},
            )
        about = {**own, **_attributes(told)}
        for more, text in _text_parts(delivery.body, self._room - _size(about) - ROOM_FOR_PART):
            entry = {
                "MessageBody": text,
                "MessageAttributes": {**about, **_attributes(more)},
            }
            if self._is_fifo:
                entry["MessageGroupId"] = message["Attributes"]["MessageGroupId"]
                entry["MessageDeduplicationId"] = "-".join((message["MessageId"], *more.values()))
            yield entry

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        self._change_visibility(deliveries, lambda _: self._visibility)

    def _change_visibility(self, deliveries: Sequence[Delivery], pause: Callable[[Delivery], int]) -> None:
        self._many(
            self._client.change_message_visibility_batch,
            deliveries,
            lambda delivery: {"VisibilityTimeout": pause(delivery)},
        )

    def _many(
        self,
        verb: Callable[..., Any],
        deliveries: Sequence[Delivery],
        more: Callable[[Delivery], dict[str, Any]],
    ) -> None:
        """Do something to messages, ten at a time. One that is no longer ours comes again, which is harmless."""
        for some in _pieces(deliveries):
            entries = [
                {"Id": str(number), "ReceiptHandle": delivery.handle["ReceiptHandle"], **more(delivery)}
                for number, delivery in enumerate(some)
            ]
            for failed in verb(QueueUrl=self._url, Entries=entries).get("Failed", ()):
                log.warning("SQS did not do as told with a message of %s: %s", self._name, failed.get("Code"))

    async def close(self) -> None:
        """What was fetched is settled by now; the client is not ours."""


def _group_of(delivery: Delivery) -> Any:
    """Its group, or itself where it has none."""
    return delivery.handle["ReceiptHandle"] if delivery.group is None else ("group", delivery.group)


def _value(attribute: dict[str, Any] | None) -> object:
    """A message attribute as what it is: text, bytes, or a number, which is no id."""
    if attribute is None:
        return None
    kind = str(attribute.get("DataType"))
    if kind.startswith("Binary"):
        return attribute.get("BinaryValue")
    return (
        attribute.get("StringValue")
        if kind.startswith("String")
        else float(attribute.get("StringValue", "nan"))
    )


def _attributes(told: Mapping[str, str]) -> dict[str, Any]:
    return {name: {"DataType": "String", "StringValue": text} for name, text in told.items()}


def _size(attributes: Mapping[str, Mapping[str, Any]]) -> int:
    """How many bytes attributes take, by SQS's own count: names, types and values."""
    return sum(
        len(each if isinstance(each, bytes) else str(each).encode("utf-8", "surrogatepass"))
        for name, attribute in attributes.items()
        for each in (name, *attribute.values())
    )


def _text_parts(body: bytes, room: int) -> list[tuple[dict[str, str], str]]:
    """A body in parts that fit, mostly in one; none ends in the middle of a character."""
    found: list[str] = []
    start = 0
    while start < len(body) or not found:
        end = start + max(room, ROOM_FOR_PART)
        while end < len(body) and body[end] & 0xC0 == 0x80:
            end -= 1
        found.append(body[start:end].decode("utf-8", "surrogatepass"))
        start = end
    if len(found) == 1:
        return [({}, found[0])]
    return [({"dead-part": f"{number}/{len(found)}"}, text) for number, text in enumerate(found, 1)]


def _loads(entries: Iterable[dict[str, Any]], room: int) -> Iterator[list[dict[str, Any]]]:
    """Entries of a request each: ten at most, and together no larger than one may be."""
    some: list[dict[str, Any]] = []
    left = room
    for entry in entries:
        size = len(entry["MessageBody"].encode("utf-8", "surrogatepass")) + _size(entry["MessageAttributes"])
        if some and (len(some) == AT_ONCE or size > left):
            yield some
            some, left = [], room
        some.append(entry)
        left -= size
    if some:
        yield some


def _pieces(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[start : start + AT_ONCE] for start in range(0, len(items), AT_ONCE))


__all__ = ["Consumer", "Options"]
