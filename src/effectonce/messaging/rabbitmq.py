"""RabbitMQ: a consumer of a queue whose messages are acknowledged when their effects are recorded.

::

    connection = await aio_pika.connect_robust(url)
    await rabbitmq.Consumer(connection, "orders", receiver=receiver).arun(handler)      # aio-pika

    rabbitmq.Consumer(pika.URLParameters(url), "orders", receiver=receiver).run(handler)     # pika

A message's id is its property ``message_id``, which publishers leave empty unless they are told, else its header
``id``. RabbitMQ has no place of a message that stays the same, so one without an id is refused: it is put aside with
the reason. What can't be processed is published to the queue ``dead_letter``, with the reason in its headers, and then
acknowledged; that queue is made when it is missing. How a message is delivered later: see ``_amqp``.

With pika the consumer opens the connection itself, so that it can open it again. While handlers run, it answers the
broker's heartbeats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from .. import batch
from ..errors import UsageError
from . import _consumer
from ._amqp import PREFETCH_BATCHES
from ._consumer import Broker, Options
from ._options import check

if TYPE_CHECKING:
    from .._receiver import Receiver


class Consumer(_consumer.Consumer):
    """Handles each message of a queue once.

    connection    of aio-pika, best a robust one; or the parameters of a connection of pika
    queue         its name; it has to be there
    dead_letter   the queue for what can't be processed; by default the queue's name with ``.dead``
    options       see ``Options``
    """

    def __init__(
        self,
        connection: Any,
        queue: str,
        *,
        receiver: Receiver,
        dead_letter: str = "",
        **options: Unpack[Options],
    ) -> None:
        check(receiver, options, dead_letter, queue=queue)
        prefetch = PREFETCH_BATCHES * options.get("batch", batch.DEFAULT_SIZE)
        dead, wanted = dead_letter or f"{queue}.dead", options.get("id")
        broker: Broker
        match type(connection).__module__.partition(".")[0]:
            case "aio_pika":
                from ._aio_pika import AioPika

                broker = AioPika(connection, queue, dead, prefetch, wanted, receiver.consumer)
            case "pika":
                from ._pika import Pika

                broker = Pika(connection, queue, dead, prefetch, wanted)
            case _:
                raise UsageError(
                    f"{type(connection).__name__}: that is neither a connection of aio-pika nor the parameters of "
                    "one of pika: pika.URLParameters(url) or pika.ConnectionParameters(...)."
                )
        super().__init__(broker, receiver, options)


__all__ = ["Consumer", "Options"]
