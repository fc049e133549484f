"""RabbitMQ through aio-pika."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage
from aio_pika.exceptions import (
    AMQPError,
    ChannelInvalidStateError,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
)

from ..errors import UsageError
from ._amqp import Held, delivery_of
from ._delivery import Ack, DeadLetter, Delivery, Nack, Verdict, labels


class AioPika:
    """A queue on a connection of aio-pika, as the loop sees it."""

    awaits = True
    away: tuple[type[Exception], ...] = (AMQPError, ChannelInvalidStateError, OSError)
    group = ""
    deadline: float | None = None

    def __init__(
        self, connection: AbstractConnection, queue: str, dead: str, prefetch: int, wanted: Any
    ) -> None:
        self._connection, self._queue, self._dead = connection, queue, dead
        self._prefetch, self._wanted = prefetch, wanted
        self._channel: AbstractChannel | None = None
        self._incoming: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
        self._held = Held()

    async def open(self) -> None:
        await self.close()
        await self._make_dead_queue()
        self._channel = await self._new_channel()
        await self._channel.set_qos(prefetch_count=self._prefetch)
        try:
            queue = await self._channel.get_queue(self._queue)
        except ChannelNotFoundEntity:
            raise UsageError(f"There is no queue {self._queue!r}. Declare it first.") from None
        incoming, self._held = asyncio.Queue[AbstractIncomingMessage](), Held()
        self._incoming = incoming

        async def take(message: AbstractIncomingMessage) -> None:
            incoming.put_nowait(message)

        await queue.consume(take)

    async def _new_channel(self) -> AbstractChannel:
        try:
            return await self._connection.channel()
        except RuntimeError as error:  # what a robust connection says while it is being made anew
            raise ConnectionError(str(error)) from error

    async def _make_dead_queue(self) -> None:
        """On a channel of its own: one that finds a queue with other arguments is closed by the broker."""
        channel = await self._new_channel()
        try:
            await channel.declare_queue(self._dead, durable=True)
        except ChannelPreconditionFailed:  # it is there, and its owner made it otherwise
            return
        await channel.close()

    async def fetch(self, most: int) -> Sequence[Delivery]:
        now = time.monotonic()
        for message in self._held.due(now):
            await message.nack(requeue=True)
        try:
            async with asyncio.timeout(self._held.wait(now)):
                messages = [await self._incoming.get()]
        except TimeoutError:
            if self._channel is None or self._channel.is_closed:
                raise ConnectionError("the channel is closed") from None
            return ()
        while len(messages) < most and not self._incoming.empty():
            messages.append(self._incoming.get_nowait())
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
            match verdict:
                case Ack():
                    await delivery.handle.ack()
                case Nack(delay=delay):
                    self._held.hold(now + delay, delivery.handle)
                case DeadLetter():
                    await self._put_aside(delivery, verdict)
                    await delivery.handle.ack()

    async def _put_aside(self, delivery: Delivery, letter: DeadLetter) -> None:
        assert self._channel is not None
        message: AbstractIncomingMessage = delivery.handle
        copy = Message(
            message.body,
            headers={**message.headers, **labels(letter, delivery)},
            message_id=message.message_id,
            timestamp=message.timestamp,
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            delivery_mode=DeliveryMode.PERSISTENT,
        )
        await self._channel.default_exchange.publish(copy, self._dead)  # confirmed by the broker

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """Nothing: the broker waits as long as the connection lives, and the client's own task keeps that."""

    async def close(self) -> None:
        """The broker gives what was not acknowledged to others."""
        channel, self._channel = self._channel, None
        if channel is not None and not channel.is_closed:
            with suppress(RuntimeError, *self.away):  # a connection that broke has closed it
                await channel.close()
