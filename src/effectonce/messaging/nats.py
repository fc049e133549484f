"""NATS JetStream: a durable pull consumer whose messages are acknowledged when their effects are recorded.

::

    connection = await nats.connect()
    consumer = jetstream.Consumer(connection.jetstream(), "ORDERS", durable="billing", receiver=receiver)
    await consumer.arun(handler)

(with ``from effectonce.messaging import nats as jetstream``). A message's id is its header ``Nats-Msg-Id``, else its
place in the stream. An acknowledgement is waited for, because one that got lost would look like a success. While a
handler runs, the server is told that work is in progress, as often as leases are renewed.

What can't be processed is published to ``dead_letter`` with the reason, and then terminated. If no stream keeps that
subject, one is made for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from ..errors import MissingExtra, UsageError
from . import _consumer
from ._consumer import Options
from ._delivery import Ack, DeadLetter, Delivery, Nack, Verdict, candidates, labels, or_place

try:
    from nats.errors import Error
    from nats.js.api import AckPolicy, ConsumerConfig
    from nats.js.errors import NotFoundError
except ImportError as error:
    raise MissingExtra("JetStream needs the package nats-py: pip install effectonce[nats]") from error

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

    from .._receiver import Receiver

MSG_ID = "Nats-Msg-Id"
WAIT_SECONDS = 1.0
ACK_SECONDS = 5.0
DEFAULT_ACK_WAIT = 30.0
"""JetStream's own."""


class Consumer(_consumer.Consumer):
    """Handles each message of a stream once.

    context       of nats-py: ``connection.jetstream()``
    stream        the stream's name
    durable       the pull consumer's name; it is made when it is missing, and begins with the oldest message
    subject       of a consumer that is made: which messages it wants, by default all
    dead_letter   the subject for what can't be processed; by default the stream's name with ``.dead``
    options       see ``Options``
    """

    def __init__(
        self,
        context: JetStreamContext,
        stream: str,
        *,
        durable: str,
        receiver: Receiver,
        subject: str = "",
        dead_letter: str = "",
        **options: Unpack[Options],
    ) -> None:
        broker = _Stream(context, stream, durable, subject, dead_letter or f"{stream}.dead")
        broker.id = options.get("id")
        super().__init__(broker, receiver, options)


class _Stream:
    """One subscription of a durable consumer, as the loop sees it."""

    awaits = True
    away: tuple[type[Exception], ...] = (Error, OSError)
    deadline: float | None = DEFAULT_ACK_WAIT
    id: Any = None

    def __init__(self, context: JetStreamContext, stream: str, durable: str, subject: str, dead: str) -> None:
        self._context, self._name, self.group = context, stream, durable
        self._subject, self._dead = subject, dead
        self._subscription: JetStreamContext.PullSubscription | None = None

    async def open(self) -> None:
        config = await self._durable_config()
        if config.ack_policy != AckPolicy.EXPLICIT:
            raise UsageError(
                f"The consumer {self.group!r} acknowledges by itself or many at once, so a message could be gone "
                "before its effect happened. Make it with ack_policy explicit."
            )
        self.deadline = min([config.ack_wait or DEFAULT_ACK_WAIT, *(config.backoff or ())])
        try:
            await self._context.find_stream_name_by_subject(self._dead)
        except NotFoundError:
            await self._context.add_stream(name=f"{self._name}-dead", subjects=[self._dead])
        if self._subscription is None:
            self._subscription = await self._context.pull_subscribe_bind(self.group, stream=self._name)

    async def _durable_config(self) -> ConsumerConfig:
        try:
            info = await self._context.consumer_info(self._name, self.group)
        except NotFoundError:
            wanted = ConsumerConfig(durable_name=self.group, filter_subject=self._subject or None)
            info = await self._context.add_consumer(self._name, wanted)
        config: ConsumerConfig = info.config
        return config

    async def fetch(self, most: int) -> Sequence[Delivery]:
        assert self._subscription is not None
        try:
            messages = await self._subscription.fetch(most, timeout=WAIT_SECONDS)
        except TimeoutError:
            return ()
        return [self._delivery(message) for message in messages]

    def _delivery(self, message: Msg) -> Delivery:
        about, headers = message.metadata, message.headers or {}
        place = (about.stream, about.sequence.stream)
        usual = or_place(f"the header {MSG_ID}", headers.get(MSG_ID), *place)
        ids = candidates(self.id, message, headers.get, usual)
        sent, times = about.timestamp.timestamp(), about.num_delivered
        return Delivery(message, self._name, ids, message.data, len(message.data), sent, times)

    async def settle(self, settled: Sequence[tuple[Delivery, Verdict]]) -> None:
        await _all(self._settle(delivery, verdict) for delivery, verdict in settled)

    async def _settle(self, delivery: Delivery, verdict: Verdict) -> None:
        message: Msg = delivery.handle
        match verdict:
            case Ack():
                await message.ack_sync(timeout=ACK_SECONDS)
            case Nack(delay=delay):
                await message.nak(delay)
            case DeadLetter():
                await self._put_aside(delivery, verdict)
                await message.term()

    async def _put_aside(self, delivery: Delivery, letter: DeadLetter) -> None:
        message: Msg = delivery.handle
        headers = dict(message.headers or {}) | labels(letter, delivery)
        if MSG_ID in headers:
            headers["dead-msg-id"] = headers[MSG_ID]
        # Its own id at the broker: two letters of one id, with different payloads, must not be taken for one.
        headers[MSG_ID] = f"dead:{delivery.source}:{message.metadata.sequence.stream}"
        await self._context.publish(self._dead, message.data, headers=headers)

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        await _all(delivery.handle.in_progress() for delivery in deliveries)

    async def close(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.unsubscribe()


async def _all(jobs: Any) -> None:
    """Bring all to their end, then raise what the first of them met."""
    pending: list[Coroutine[Any, Any, None]] = list(jobs)
    for result in await asyncio.gather(*pending, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


__all__ = ["Consumer", "Options"]
