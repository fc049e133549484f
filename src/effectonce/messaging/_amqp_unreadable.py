"""Messages that aio-pika can't read: found with pika, which can, and put aside.

aio-pika closes its connection at a message whose properties are not what they should be: an id that is not UTF-8, a
timestamp beyond the year 9999. Nobody has seen it then, the broker delivers it again, and the next connection ends in
the same way: one such message would stop its queue. pika leaves these values as they are. The extra ``rabbitmq`` has
both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pika  # type: ignore[import-untyped]
from pamqp.exceptions import PAMQPException
from pamqp.frame import unmarshal
from pika.frame import Header  # type: ignore[import-untyped]

from ._amqp import delivery_of, letters_of
from ._delivery import DeadLetter, explained
from ._letters import labels

PERSISTENT = 2


def put_aside(url: str, queue: str, dead: str, most: int, consumer: str) -> int:
    """Look at the next messages of a queue and put aside those that can't be read; how many that were.

    The others go back to where they were. They come with the mark of a redelivery, as after any lost connection.
    """
    found = 0
    connection = pika.BlockingConnection(pika.URLParameters(url))
    try:
        channel = connection.channel()
        channel.confirm_delivery()
        for _ in range(most):
            method, about, body = channel.basic_get(queue)
            if method is None or body is None:
                break
            if (letter := _trouble(about, body)) is not None:
                told = letter._replace(consumer=consumer)
                for copy, part in _copies(told, queue, about, body, method.redelivered):
                    channel.basic_publish("", dead, part, copy, mandatory=True)  # confirmed, or an error
                channel.basic_ack(method.delivery_tag)
                found += 1
    finally:
        connection.close()
    return found


def _trouble(about: Any, body: bytes) -> DeadLetter | None:
    """What aio-pika would meet, by its own decoder."""
    try:
        unmarshal(Header(1, len(body), about).marshal())
    except PAMQPException as error:
        return DeadLetter("undecodable", explained(error))
    return None


def _copies(
    letter: DeadLetter, queue: str, about: Any, body: bytes, redelivered: bool
) -> Iterator[tuple[Any, bytes]]:
    """Properties for the dead letter that everybody can read: without what was wrong. And its body, or parts of it."""
    name = about.message_id if isinstance(about.message_id, str) else None
    delivery = delivery_of(
        None,
        queue,
        None,
        message_id=name,
        headers=about.headers,
        timestamp=None,
        body=body,
        redelivered=redelivered,
    )
    told = labels(letter, delivery)
    for headers, part in letters_of(about.headers, told, body):
        whole = pika.BasicProperties(headers=headers, message_id=name, delivery_mode=PERSISTENT)
        plain = pika.BasicProperties(headers=told, delivery_mode=PERSISTENT)
        yield plain if _trouble(whole, part) else whole, part
