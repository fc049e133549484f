"""RabbitMQ: an event is a persistent message whose ``message_id`` is the event's id, confirmed by the broker.

A window of messages is on its way at once. An exchange routes them by topic; with the default one the topic is the name
of a queue. What no queue would get is refused, because it would be lost without a word.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self
from urllib.parse import parse_qsl, urlencode, urlsplit

from ...errors import MissingExtra, UsageError
from ...stores._urls import shown
from .._events import Event, Results, Unsent

try:
    import aiormq
    from aiormq.exceptions import DeliveryError
except ImportError as error:
    raise MissingExtra("RabbitMQ needs the package aio-pika: pip install effectonce[rabbitmq]") from error

PERSISTENT = 2


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
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        exchange, mandatory = options.pop("exchange", ""), options.pop("mandatory", "yes")
        if mandatory not in ("yes", "no"):
            raise UsageError(f"{shown(url)!r}: mandatory= must be yes or no.")
        plain = parts._replace(query=urlencode(options)).geturl()
        return cls(plain, exchange=exchange, mandatory=mandatory == "yes")

    async def publish(self, events: Sequence[Event]) -> Results:
        """Send all events, then wait for their confirmations."""
        channel = await self._open_channel()
        sent = [self._send(channel, event) for event in events]
        answers = await asyncio.gather(*sent, return_exceptions=True)
        results = [None if not isinstance(answer, BaseException) else _meaning(answer) for answer in answers]
        if any(isinstance(result, Unsent) for result in results):
            await self.close()  # a channel that was closed takes all that was on its way along
        return results

    def _send(self, channel: Any, event: Event) -> Any:
        headers: dict[str, Any] = dict(event.headers)
        if event.key is not None:
            headers["key"] = event.key
        properties = aiormq.spec.Basic.Properties(
            message_id=event.id,
            delivery_mode=PERSISTENT,
            headers=headers or None,
            content_type=headers.pop("content-type", None),
        )
        return channel.basic_publish(
            event.payload,
            exchange=self._exchange,
            routing_key=event.topic,
            properties=properties,
            mandatory=self._mandatory,
            wait=False,
        )

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


def _meaning(error: BaseException) -> Exception:
    """A message that was returned or refused failed by itself; all else is the connection's fault."""
    if isinstance(error, DeliveryError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return Unsent("RabbitMQ closed the channel.")
    if isinstance(error, ValueError | TypeError):
        return error
    return Unsent(f"{type(error).__name__}: {error}")
