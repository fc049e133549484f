"""RabbitMQ: an event is a persistent message whose ``message_id`` is the event's id, confirmed by the broker.

A window of messages is on its way at once. An exchange routes them by topic; with the default one the topic is the name
of a queue. What no queue would get is refused, because it would be lost without a word.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import Any, Self
from urllib.parse import parse_qsl, urlencode

from ...errors import MissingExtra, UsageError
from ...stores._urls import shown, split
from .._events import Event, Results, Unsent

try:
    import aiormq
    from aiormq import spec
    from aiormq.abc import ChannelFrame
    from aiormq.exceptions import ChannelPreconditionFailed, ConnectionFrameError, DeliveryError
    from pamqp.body import ContentBody
    from pamqp.frame import marshal
    from pamqp.header import ContentHeader
except ImportError as error:
    raise MissingExtra("RabbitMQ needs the package aio-pika: pip install effectonce[rabbitmq]") from error

PERSISTENT = 2
LONGEST_NAME = 128
"""Bytes of a header's name; the encoder cuts off what is longer."""


class Refused(Exception):
    """An event that can't be a message of AMQP."""


class Objection(Unsent):
    """The broker closed the channel because of a message in the window, and does not say which."""


class RabbitMQ:
    """Publishes to an exchange of a RabbitMQ server.

    url        amqp://user:password@host:5672/vhost
    exchange   which has to be there; the topic is the routing key
    mandatory  whether an event that no queue would get is a failure
    """

    keeps_order = False

    def __init__(self, url: str, *, exchange: str = "", mandatory: bool = True) -> None:
        self._url, self._exchange, self._mandatory = url, exchange, mandatory
        self._connection: Any = None
        self._channel: Any = None

    @classmethod
    def from_url(cls, url: str) -> Self:
        """``amqp://user:password@host:5672/vhost?exchange=events&mandatory=no``."""
        parts = split(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        exchange, mandatory = options.pop("exchange", ""), options.pop("mandatory", "yes")
        if mandatory not in ("yes", "no"):
            raise UsageError(f"{shown(url)!r}: mandatory= must be yes or no.")
        plain = parts._replace(query=urlencode(options)).geturl()
        return cls(plain, exchange=exchange, mandatory=mandatory == "yes")

    async def publish(self, events: Sequence[Event]) -> Results:
        """Send all events; where the broker objects to one of them, one by one, so that only that one fails."""
        results = await self._publish(events)
        if not any(isinstance(result, Objection) for result in results):
            return results
        if len(events) == 1:
            return [Refused(str(results[0]))]
        answers: list[Exception | None] = []
        for event, result in zip(events, results, strict=True):
            answers += await self.publish([event]) if isinstance(result, Unsent) else [result]
        return answers

    async def _publish(self, events: Sequence[Event]) -> Results:
        """Send a window of events, then wait for their confirmations."""
        channel = await self._open_channel()
        confirmations = await self._send(channel, events)
        await asyncio.wait(confirmations)
        for event in events:
            channel.message_id_delivery_tag.pop(event.id, None)
        results = [_meaning(confirmation) for confirmation in confirmations]
        if any(isinstance(result, Unsent) for result in results):
            await self.close()  # a channel that was closed takes all that was on its way along
        return results

    async def _send(self, channel: Any, events: Sequence[Event]) -> list[asyncio.Future[Any]]:
        """Write a whole window at once, the way aiormq's own ``basic_publish`` writes one message.

        That one takes a task, a lock and a time-out for each message: seven times as much work for us, and as much as
        the broker has with it.
        """
        confirmations: list[asyncio.Future[Any]] = []
        frames: list[bytes] = []
        openings: dict[str, bytes] = {}
        async with channel.lock:
            for event in events:
                confirmations.append(channel.create_future())
                try:
                    if event.topic not in openings:
                        openings[event.topic] = self._opening(channel, event.topic)
                    message = [openings[event.topic], *_content(channel, event)]
                except (TypeError, ValueError, struct.error) as error:  # a name that AMQP has no room for
                    confirmations[-1].set_exception(Refused(str(error)))
                    continue
                channel.delivery_tag += 1
                channel.confirmations[channel.delivery_tag] = confirmations[-1]
                channel.message_id_delivery_tag[event.id] = channel.delivery_tag
                frames += message
            await channel.write_queue.put(ChannelFrame(payload=b"".join(frames), should_close=False))
        return confirmations

    def _opening(self, channel: Any, topic: str) -> bytes:
        method = spec.Basic.Publish(exchange=self._exchange, routing_key=topic, mandatory=self._mandatory)
        return marshal(method, channel.number)

    async def _open_channel(self) -> Any:
        if self._channel is None or self._channel.is_closed:
            await self.close()
            self._connection = await aiormq.connect(self._url)
            self._channel = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
        return self._channel

    async def close(self) -> None:
        """Close the connection."""
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            await connection.close()


def _content(channel: Any, event: Event) -> list[bytes]:
    """The frames of a message's properties and body."""
    headers: dict[str, Any] = dict(event.headers)
    kind = headers.pop("content-type", None)
    if event.key is not None:
        headers["key"] = event.key
    if long := [name for name in headers if len(name.encode()) > LONGEST_NAME]:
        raise ValueError(f"the name of the header {long[0][:40]}… has more than {LONGEST_NAME} bytes")
    properties = spec.Basic.Properties(
        content_type=kind, headers=headers or None, delivery_mode=PERSISTENT, message_id=event.id
    )
    body, most = event.payload, channel.max_content_size
    parts = [body[start : start + most] for start in range(0, len(body), most)]
    content: list[Any] = [ContentHeader(properties=properties, body_size=len(body)), *map(ContentBody, parts)]
    return [marshal(frame, channel.number) for frame in content]


def _meaning(confirmation: asyncio.Future[Any]) -> Exception | None:
    """A message that was returned or refused failed by itself; all else is the connection's fault."""
    if confirmation.cancelled():
        return Unsent("RabbitMQ closed the channel.")
    error = confirmation.exception()
    if error is None or isinstance(error, DeliveryError | Refused):
        return error
    kind = Objection if isinstance(error, ChannelPreconditionFailed | ConnectionFrameError) else Unsent
    return kind(f"{type(error).__name__}: {error}")
