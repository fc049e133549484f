"""Publishers: what hands events to a broker, one file each. ``open_publisher`` finds the right one for a URL."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from ...errors import UsageError
from ...stores._urls import shown
from .._events import Event, Publisher

SCHEMES = {
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys"), "redis_streams:RedisStreams"),
    **dict.fromkeys(("amqp", "amqps"), "rabbitmq:RabbitMQ"),
    **dict.fromkeys(("nats", "tls+nats"), "nats:JetStream"),
    "kafka": "kafka:Kafka",
    "sqs": "sqs:SQS",
    **dict.fromkeys(("http", "https"), "webhook:Webhook"),
}


def open_publisher(publisher: Publisher | Callable[[Event], object] | str) -> Publisher:
    """A publisher as it is, one for a broker's URL, or one around a callable."""
    if isinstance(publisher, str):
        scheme = publisher.partition("://")[0] if "://" in publisher else ""
        if scheme not in SCHEMES:
            raise UsageError(
                f"{shown(publisher)!r} is no broker. Known are {', '.join(f'{known}://' for known in SCHEMES)}."
            )
        module, _, name = SCHEMES[scheme].partition(":")
        kind: Any = getattr(import_module(f".{module}", __package__), name)
        opened: Publisher = kind.from_url(publisher)
        return opened
    if isinstance(publisher, Publisher):
        return publisher
    if callable(publisher):
        from .function import around

        return around(publisher)
    raise UsageError(
        f"{publisher!r} is no publisher: give a broker's URL, a callable, or an object with publish()."
    )


__all__ = ["Publisher", "open_publisher"]
