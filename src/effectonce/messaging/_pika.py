"""RabbitMQ through pika, on a connection that is opened here."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import pika  # type: ignore[import-untyped]
from pika.connection import Parameters  # type: ignore[import-untyped]
from pika.exceptions import (  # type: ignore[import-untyped]
    AMQPError,
    AuthenticationError,
    ChannelClosedByBroker,
    ConnectionClosedByBroker,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
)

from .._records import make
from ..errors import UsageError
from ._amqp import Held, Unsettled, delivery_of, kept, letters_of
from ._delivery import Ack, DeadLetter, Delivery, Nack, Verdict
from ._letters import labels

ACCESS_REFUSED, NOT_FOUND, PRECONDITION_FAILED, NOT_ALLOWED = 403, 404, 406, 530
DEFAULT_HEARTBEAT = 60.0
PERSISTENT = 2


class Incoming(NamedTuple):
    """A message as pika hands it over."""

    method: Any
    properties: Any
    body: bytes


class Pika:
    """A queue on a connection of pika, as the loop sees it.

    The connection is not made for several threads at once. The heartbeat uses it beside the handlers, so whoever uses
    it holds the lock.
    """

    awaits = False
    away: tuple[type[Exception], ...] = (AMQPError, OSError)
    is_let_in = True
    group = ""

    def __init__(self, parameters: Any, queue: str, dead: str, prefetch: int, wanted: Any) -> None:
        if not isinstance(parameters, Parameters):
            raise UsageError(
                "Give the parameters of a connection of pika, so that it can be opened again: pika.URLParameters(url)."
            )
        self._parameters, self._queue, self._dead = parameters, queue, dead
        self._prefetch, self._wanted = prefetch, wanted
        beat = parameters.heartbeat
        self.deadline: float | None = float(beat) if isinstance(beat, int) and beat else DEFAULT_HEARTBEAT
        self._connection: Any = None
        self._channel: Any = None
        self._incoming: deque[Incoming] = deque()
        self._held, self._unsettled = Held(), Unsettled()
        self._lock = threading.Lock()

    def refuses(self, error: Exception) -> bool:
        """By the broker's own word: a connection that is lost during the handshake is only *probably* refused."""
        if isinstance(error, ProbableAuthenticationError | ProbableAccessDeniedError):
            return ConnectionClosedByBroker.__name__ in str(error)
        if isinstance(error, ChannelClosedByBroker | ConnectionClosedByBroker):
            return error.reply_code in (ACCESS_REFUSED, NOT_ALLOWED)
        return isinstance(error, AuthenticationError)

    async def open(self) -> None:
        await self.close()
        with self._lock:
            self._connection = pika.BlockingConnection(self._parameters)
            self._make_dead_queue()
            channel = self._channel = self._connection.channel()
            channel.confirm_delivery()
            channel.basic_qos(prefetch_count=self._prefetch)
            incoming, unsettled = deque[Incoming](), Unsettled()
            self._incoming, self._held, self._unsettled = incoming, Held(), unsettled
            try:
                channel.queue_declare(self._queue, passive=True)
            except ChannelClosedByBroker as error:
                if error.reply_code != NOT_FOUND:
                    raise
                raise UsageError(f"There is no queue {self._queue!r}. Declare it first.") from None
            # A queue that is deleted takes its consumers along, and pika says so in silence.
            channel.add_on_cancel_callback(lambda _: channel.close())

            def take(_: Any, *message: Any) -> None:
                incoming.append(make(Incoming, message))
                unsettled.add(message[0].delivery_tag)

            channel.basic_consume(self._queue, take)

    def _make_dead_queue(self) -> None:
        """If it is missing: only who has to make it needs the permission to. One that is there may be otherwise."""
        if self._declared(NOT_FOUND, passive=True) is None:
            self._declared(PRECONDITION_FAILED, durable=True)

    def _declared(self, excused: int, **how: Any) -> Any:
        """On a channel of its own: the broker closes one that asks for what can't be. None if that is excused."""
        channel = self._connection.channel()
        try:
            found = channel.queue_declare(self._dead, **how)
        except ChannelClosedByBroker as error:
            if error.reply_code != excused:
                raise
            return None
        channel.close()
        return found

    async def fetch(self, most: int) -> Sequence[Delivery]:
        now = time.monotonic()
        with self._lock:
            for message in self._held.due(now):
                self._channel.basic_nack(message.method.delivery_tag, requeue=True)
                self._unsettled.drop(message.method.delivery_tag)
            if not self._incoming:
                self._connection.process_data_events(time_limit=self._held.wait(now))
            waiting = -1
            while waiting < len(self._incoming) < most:  # what is there already, to claim it together
                waiting = len(self._incoming)
                self._connection.process_data_events(time_limit=0)
            if self._channel.is_closed:
                raise ConnectionError("the channel is closed")
        some = min(most, len(self._incoming))
        return [self._delivery(self._incoming.popleft()) for _ in range(some)]

    def _delivery(self, message: Incoming) -> Delivery:
        about = message.properties
        return delivery_of(
            message,
            self._queue,
            self._wanted,
            message_id=about.message_id,
            headers=about.headers,
            timestamp=about.timestamp,
            body=message.body,
            redelivered=message.method.redelivered,
        )

    async def settle(self, settled: Sequence[tuple[Delivery, Verdict]]) -> None:
        now = time.monotonic()
        with self._lock:
            for delivery, verdict in settled:
                if isinstance(verdict, Nack):
                    self._held.hold(now + verdict.delay, delivery.handle)
            self._acknowledge([delivery for delivery, verdict in settled if isinstance(verdict, Ack)])
            # Last: a letter that can't be published must not keep others from being settled.
            letters = [(each, verdict) for each, verdict in settled if isinstance(verdict, DeadLetter)]
            for delivery, letter in letters:
                self._put_aside(delivery, letter)
            self._acknowledge([delivery for delivery, _ in letters])

    def _acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        if not deliveries:
            return
        together, others = self._unsettled.settle(each.handle.method.delivery_tag for each in deliveries)
        if together:
            self._channel.basic_ack(together, multiple=True)
        for tag in others:
            self._channel.basic_ack(tag)
        self._connection.process_data_events(time_limit=0)  # so that they are sent

    def _put_aside(self, delivery: Delivery, letter: DeadLetter) -> None:
        message: Incoming = delivery.handle
        about = message.properties
        for headers, body in letters_of(about.headers, labels(letter, delivery), message.body):
            properties = pika.BasicProperties(
                headers=headers,
                **kept(about),
                delivery_mode=PERSISTENT,
            )
            # Confirmed by the broker; one that it can't put anywhere is an error.
            self._channel.basic_publish("", self._dead, body, properties, mandatory=True)

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """Answer the broker's heartbeats, which nobody else does while handlers run."""
        with self._lock:
            self._connection.process_data_events(time_limit=0)

    async def close(self) -> None:
        """The broker gives what was not acknowledged to others."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None and connection.is_open:
                connection.close()
