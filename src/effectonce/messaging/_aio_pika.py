"""RabbitMQ through aio-pika."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from aio_pika import DeliveryMode, Message
from aio_pika.abc import (
    AbstractChannel,
    AbstractConnection,
    AbstractIncomingMessage,
    AbstractRobustConnection,
)
from aio_pika.exceptions import (
    AMQPError,
    ChannelInvalidStateError,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
)
from aiormq.exceptions import ChannelAccessRefused, InvalidFrameError

from ..errors import UsageError
from ._amqp import Held, Unsettled, delivery_of, kept, letters_of
from ._delivery import Ack, DeadLetter, Delivery, Nack, Verdict
from ._letters import labels

log = logging.getLogger("effectonce.messaging")


class AioPika:
    """A queue on a connection of aio-pika, as the loop sees it."""

    awaits = True
    away: tuple[type[Exception], ...] = (AMQPError, ChannelInvalidStateError, OSError)
    group = ""
    deadline: float | None = None
    is_let_in = True

    def __init__(
        self,
        connection: AbstractConnection,
        queue: str,
        dead: str,
        prefetch: int,
        wanted: Any,
        consumer: str = "",
    ) -> None:
        self._connection, self._queue, self._dead = connection, queue, dead
        self._prefetch, self._wanted, self._consumer = prefetch, wanted, consumer
        self._channel: AbstractChannel | None = None
        self._is_unreadable = False
        self._arrivals, self._held = _Arrivals(), Held()

    def refuses(self, error: Exception) -> bool:
        """What a user may not do. Who may connect at all its owner has found out."""
        return isinstance(error, ChannelAccessRefused)

    async def open(self) -> None:
        await self.close()
        if self._is_over():
            raise UsageError(
                "The connection is closed, and does not open again by itself. Make it with aio_pika.connect_robust(…), "
                "and leave it open while the consumer runs."
            )
        await self._make_dead_queue()
        if self._is_unreadable:
            await self._put_aside_unreadable()
        self._channel = await self._new_channel()
        self._channel.close_callbacks.add(self._hear)
        await self._channel.set_qos(prefetch_count=self._prefetch)
        try:
            queue = await self._channel.get_queue(self._queue)
        except ChannelNotFoundEntity:
            raise UsageError(f"There is no queue {self._queue!r}. Declare it first.") from None
        self._arrivals, self._held = _Arrivals(), Held()
        await queue.consume(self._arrivals.take)

    def _is_over(self) -> bool:
        """Whether the connection was closed by its owner, or lost and is none that is made anew."""
        connection = self._connection
        is_robust = isinstance(connection, AbstractRobustConnection)
        return connection.is_closed or not (is_robust or connection.connected.is_set())

    async def _new_channel(self) -> AbstractChannel:
        try:
            return await self._connection.channel()
        except RuntimeError as error:  # what a robust connection says while it is being made anew
            raise ConnectionError(str(error)) from error

    async def _make_dead_queue(self) -> None:
        """If it is missing: only who has to make it needs the permission to. One that is there may be otherwise."""
        if await self._declared(ChannelNotFoundEntity, passive=True) is None:
            await self._declared(ChannelPreconditionFailed, durable=True)

    async def _declared(self, excused: type[Exception], **how: Any) -> Any:
        """On a channel of its own: the broker closes one that asks for what can't be. None if that is excused."""
        channel = await self._new_channel()
        try:
            return await channel.declare_queue(self._dead, **how)
        except excused:
            return None
        finally:
            await self._give_up(channel)

    def _hear(self, _: object, error: BaseException | None) -> None:
        """Why the channel was closed: perhaps by the client itself, over a message."""
        self._is_unreadable = self._is_unreadable or isinstance(error, InvalidFrameError)

    async def _put_aside_unreadable(self) -> None:
        connection: Any = self._connection
        url = str(connection.url.with_query(None))
        try:
            from ._amqp_unreadable import put_aside

            places = (url, self._queue, self._dead, self._prefetch, self._consumer)
            found = await asyncio.to_thread(put_aside, *places)
        except Exception as error:  # pika's own, or there is no pika
            raise ConnectionError(
                f"a message of {self._queue!r} that aio-pika can't read has to be put aside with pika (pip install "
                f"effectonce[rabbitmq]), which did not succeed: {type(error).__name__}"
            ) from error
        log.warning("%d messages of %s that aio-pika can't read were put aside", found, self._queue)
        self._is_unreadable = False

    async def fetch(self, most: int) -> Sequence[Delivery]:
        if self._is_unreadable:
            raise ConnectionError("aio-pika closed the connection at a message that it can't read")
        now = time.monotonic()
        for message in self._held.due(now):
            await message.nack(requeue=True)
            self._arrivals.unsettled.drop(_tag(message))
        incoming = self._arrivals.queue
        try:
            async with asyncio.timeout(self._held.wait(now)):
                messages = [await incoming.get()]
        except TimeoutError:
            if self._channel is None or self._channel.is_closed:
                raise ConnectionError("the channel is closed") from None
            return ()
        while len(messages) < most and not incoming.empty():
            messages.append(incoming.get_nowait())
        return [self._delivery(message) for message in messages]

    def _delivery(self, message: AbstractIncomingMessage) -> Delivery:
        return delivery_of(
            message,
            self._queue,
            self._wanted,
            message_id=message.message_id,
            headers=message.headers,
            timestamp=None if message.timestamp is None else message.timestamp.timestamp(),
            body=message.body,
            redelivered=bool(message.redelivered),
        )

    async def settle(self, settled: Sequence[tuple[Delivery, Verdict]]) -> None:
        now = time.monotonic()
        for delivery, verdict in settled:
            if isinstance(verdict, Nack):
                self._held.hold(now + verdict.delay, delivery.handle)
        await self._acknowledge(
            [delivery.handle for delivery, verdict in settled if isinstance(verdict, Ack)]
        )
        # Last: a letter that can't be published must not keep others from being settled.
        letters = [(each, verdict) for each, verdict in settled if isinstance(verdict, DeadLetter)]
        for delivery, letter in letters:
            await self._put_aside(delivery, letter)
        await self._acknowledge([delivery.handle for delivery, _ in letters])

    async def _acknowledge(self, messages: Sequence[AbstractIncomingMessage]) -> None:
        done = {_tag(message): message for message in messages}
        together, others = self._arrivals.unsettled.settle(done)
        if together:
            await done[together].ack(multiple=True)
        for tag in others:
            await done[tag].ack()

    async def _put_aside(self, delivery: Delivery, letter: DeadLetter) -> None:
        assert self._channel is not None
        message: AbstractIncomingMessage = delivery.handle
        for headers, body in letters_of(message.headers, labels(letter, delivery), message.body):
            copy = Message(
                body,
                headers=headers,
                **kept(message),
                delivery_mode=DeliveryMode.PERSISTENT,
            )
            await self._channel.default_exchange.publish(copy, self._dead)  # confirmed by the broker

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """Nothing: the broker waits as long as the connection lives, and the client's own task keeps that."""

    async def close(self) -> None:
        """The broker gives what was not acknowledged to others."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await self._give_up(channel)

    async def _give_up(self, channel: AbstractChannel) -> None:
        """Close it, also if it is closed: else a robust connection opens it again one day, and consumes for nobody."""
        with suppress(RuntimeError, *self.away):  # a connection that broke has closed it
            await channel.close()


class _Arrivals:
    """What has come and is not settled. A robust connection that was made anew goes on calling, with new tags."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
        self.unsettled = Unsettled()
        self._channel: object = None

    async def take(self, message: AbstractIncomingMessage) -> None:
        with suppress(ChannelInvalidStateError):  # already gone again: the broker has it
            if message.channel is not self._channel:
                self._channel, self.unsettled = message.channel, Unsettled()
            self.unsettled.add(_tag(message))
            self.queue.put_nowait(message)


def _tag(message: AbstractIncomingMessage) -> int:
    """Its tag, which is one of its own channel: an error if that is closed, since others begin at one again."""
    assert not message.channel.is_closed  # asking for it raises
    return message.delivery_tag or 0
