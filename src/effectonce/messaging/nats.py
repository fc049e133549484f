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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

from .._records import make
from ..errors import MissingExtra, StoreUnavailable, UsageError
from . import _consumer
from ._consumer import Options
from ._cursor import check_end
from ._delivery import Ack, DeadLetter, Delivery, Nack, Verdict, candidates, or_place
from ._letters import apart, crowded, labels, parts
from ._options import check, comes_back

try:
    from nats.errors import Error
    from nats.js.api import AckPolicy, ConsumerConfig
    from nats.js.errors import APIError, NotFoundError
except ImportError as error:
    raise MissingExtra("JetStream needs the package nats-py: pip install effectonce[nats]") from error

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

    from .._receiver import Receiver
    from ._cursor_mode import Cursors

MSG_ID = "Nats-Msg-Id"
IN_HEADER = f"the header {MSG_ID}"
WAIT_SECONDS = 1.0
ACK_SECONDS = 5.0
DEFAULT_ACK_WAIT = 30.0
"""JetStream's own."""
REFUSALS = frozenset({10039, 10059, 10065, 10093})
"""JetStream's codes: not for this account; no such stream; a subject of another stream; one that is not of this."""
PLAIN_REPLY = 9
"""Parts of the subject to acknowledge to, which tells of a message, in a server that has no domain."""
AROUND, ROOM_FOR_PART = 4, 128
"""Bytes of a header besides its name and value, and of what is told of a part besides."""
MOST_OF_HEADERS = 65_535 - ROOM_FOR_PART
"""Bytes that JetStream takes of headers."""


class Consumer(_consumer.Consumer):
    """Handles each message of a stream once.

    context       of nats-py: ``connection.jetstream()``
    stream        the stream's name
    durable       the pull consumer's name; it is made when it is missing, and begins with the oldest message
    subject       of a consumer that is made: which messages it wants, by default all
    dead_letter   the subject for what can't be processed; by default the stream's name with ``.dead``, or with
                  ``-dead`` where the durable would be given that one. It is refused if it is given this one, too
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
        check(receiver, options, dead_letter, stream=stream, durable=durable)
        if not hasattr(context, "pull_subscribe_bind"):
            raise UsageError(
                f"A {type(context).__name__} is no JetStream context. Write connection.jetstream()."
            )
        broker = _Stream(context, stream, durable, subject, dead_letter)
        broker.id = options.get("id")
        super().__init__(broker, receiver, options)


class _Stream:
    """One subscription of a durable consumer, as the loop sees it."""

    awaits = True
    away: tuple[type[Exception], ...] = (Error, OSError)
    deadline: float | None = DEFAULT_ACK_WAIT
    is_let_in = True
    id: Any = None
    in_order = False
    cursors: Cursors | None = None

    def __init__(self, context: JetStreamContext, stream: str, durable: str, subject: str, dead: str) -> None:
        self._context, self._name, self.group = context, stream, durable
        self._subject, self._dead = subject, dead
        self._subscription: JetStreamContext.PullSubscription | None = None
        self._confirmed: _Confirmed | None = None

    def refuses(self, error: Exception) -> bool:
        """What JetStream says itself: a permission that is missing looks like a server that does not answer."""
        return isinstance(error, APIError) and error.err_code in REFUSALS

    async def open(self) -> None:
        if self._context._nc.is_closed:
            raise UsageError(
                "The connection is closed, and does not open again by itself: its owner closed it, or it has used up "
                "its tries to reconnect. nats.connect(…, max_reconnect_attempts=-1) has no end of them."
            )
        config = await self._durable_config()
        if config.ack_policy != AckPolicy.EXPLICIT:
            raise UsageError(
                f"The consumer {self.group!r} acknowledges by itself or many at once, so a message could be gone "
                "before its effect happened. Make it with ack_policy explicit."
            )
        self.deadline = min([config.ack_wait or DEFAULT_ACK_WAIT, *(config.backoff or ())])
        self._dead = await place_apart(self._context, self._name, config, self._dead)
        await self._check_cursor()
        if self._subscription is None:
            self._subscription = await self._context.pull_subscribe_bind(self.group, stream=self._name)
            self._confirmed = await _Confirmed.of(self._context._nc)

    async def _check_cursor(self) -> None:
        """Raise if the cursor is beyond the stream's end: then it is another stream's of the same name."""
        if self.cursors is None:
            return
        try:
            await self.cursors.take([self._name])
        except StoreUnavailable as error:
            raise ConnectionError(str(error)) from error
        end = (await self._context.stream_info(self._name)).state.last_seq + 1
        # Not where it is low: numbers begin at 1, and who waits for 0 does so for long.
        check_end(self._name, self.cursors.taken()[self._name].cursor.end, end)

    async def floor(self, source: str) -> int:
        """Acknowledgements follow commits: what the server has them for, without a gap, is not delivered again."""
        info = await self._context.consumer_info(self._name, self.group)
        return info.ack_floor.stream_seq + 1 if info.ack_floor is not None else 0

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
        (stream, number, times, sent), headers = _told(message), message.headers or {}
        ids = or_place(IN_HEADER, headers.get(MSG_ID), stream, number)
        if self.id is not None:
            ids = candidates(self.id, message, headers.get, ids)
        body, name = message.data, self._name
        return make(Delivery, (message, name, ids, body, len(body), sent, times, None, (name, number)))

    async def settle(self, settled: Sequence[tuple[Delivery, Verdict]]) -> None:
        assert self._confirmed is not None
        await self._confirmed.acknowledge(
            [delivery.handle for delivery, verdict in settled if isinstance(verdict, Ack)]
        )
        for delivery, verdict in settled:
            if isinstance(verdict, Nack):
                await delivery.handle.nak(verdict.delay)
        # Last: a letter that can't be published must not keep others from being settled.
        for delivery, verdict in settled:
            if isinstance(verdict, DeadLetter):
                await put_aside(self._context, self._dead, delivery.handle, delivery, verdict)
                await delivery.handle.term()

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            await delivery.handle.in_progress()

    async def close(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.unsubscribe()
        confirmed, self._confirmed = self._confirmed, None
        if confirmed is not None:
            await confirmed.close()


def _told(message: Msg) -> tuple[str, int, int, float]:
    """The stream, the number there, how often it was delivered and when it was sent: ``metadata``, by a shorter way."""
    parts = message.reply.split(".")
    if len(parts) == PLAIN_REPLY:
        _, _, stream, _, times, number, _, nanoseconds, _ = parts
        return stream, int(number), int(times), int(nanoseconds) / 1e9
    about = message.metadata
    return about.stream, about.sequence.stream, about.num_delivered, about.timestamp.timestamp()


async def place_apart(context: JetStreamContext, stream: str, config: ConsumerConfig, wanted: str) -> str:
    """The subject of dead letters, which some stream keeps and the stream's own consumer is not given."""
    usual = f"{stream}.dead", f"{stream}-dead"
    for dead in (wanted,) if wanted else usual:
        try:
            keeps = await context.find_stream_name_by_subject(dead)
        except NotFoundError:
            await context.add_stream(name=dead.replace(".", "-"), subjects=[dead])
            return dead
        if keeps != stream or not is_meant(config, dead):
            return dead
    raise comes_back(wanted or usual[0], f'"{usual[1]}", or another subject that the stream does not have')


def is_meant(config: ConsumerConfig, subject: str) -> bool:
    """Whether a durable is given the messages of a subject that its stream has."""
    filters = config.filter_subjects or ([config.filter_subject] if config.filter_subject else [">"])
    return any(_matches(each.split("."), subject.split(".")) for each in filters)


def _matches(pattern: list[str], words: list[str]) -> bool:
    """By the rules of NATS: * is any word, and > any words at the end."""
    if pattern[-1] == ">":
        return len(words) >= len(pattern) and all(map(_is_word, pattern[:-1], words))
    return len(words) == len(pattern) and all(map(_is_word, pattern, words))


def _is_word(wanted: str, word: str) -> bool:
    return wanted in ("*", word)


async def put_aside(
    context: JetStreamContext, subject: str, message: Msg, delivery: Delivery, letter: DeadLetter
) -> None:
    """Publish a dead letter; in parts, if it is too large for the server together with what is told of it."""
    about = message.metadata
    own, told = message.headers or {}, labels(letter, delivery)
    headers = {_harmless(name): text for name, text in own.items()} | told
    # Its own id at the broker: two letters of one id, with different payloads, must not be taken for one. Nor must
    # those of two consumers of one stream.
    name = f"dead:{about.consumer}:{about.stream}:{about.sequence.stream}"
    most = context._nc.max_payload - ROOM_FOR_PART - len(name)
    if _size(headers) > MOST_OF_HEADERS - len(name) or crowded(message.data, most - _size(headers)):
        headers, found = told, apart(own, message.data, most - _size(told))
    else:
        found = parts(message.data, most - _size(headers))
    for more, body in found:
        place = more.get("dead-part")
        await context.publish(
            subject, body, headers={**headers, **more, MSG_ID: f"{name}/{place}" if place else name}
        )


def _harmless(name: str) -> str:
    """A name that the server does not listen to: what was asked of the first stream is not asked of the next."""
    return f"dead-{name[5:].lower()}" if name.lower().startswith("nats-") else name


def _size(headers: dict[str, str]) -> int:
    return sum(len(name.encode()) + len(text.encode()) + AROUND for name, text in headers.items())


class _Confirmed:
    """Acknowledges messages together, and waits until the server has confirmed every one of them.

    What ``ack_sync`` does for one with a request of its own: here a batch shares the inbox that answers come to.
    """

    def __init__(self, connection: Any) -> None:
        self._connection, self._inbox = connection, connection.new_inbox()
        self._batch = 0
        self._left, self._done = 0, asyncio.Event()
        self._refusal = ""
        self._subscription: Any = None

    @classmethod
    async def of(cls, connection: Any) -> _Confirmed:
        """One that is ready."""
        made = cls(connection)
        made._subscription = await connection.subscribe(f"{made._inbox}.*", cb=made._hear)
        return made

    async def acknowledge(self, messages: Sequence[Msg]) -> None:
        """Acknowledge all of them. A confirmation that does not come is a broker that is away."""
        if not messages:
            return
        self._batch += 1  # so that answers to an earlier batch, which came too late, are not taken for these
        self._left, self._refusal = len(messages), ""
        self._done.clear()
        inbox = self._place()
        for message in messages:
            await self._connection.publish(message.reply, message.Ack.Ack, reply=inbox)
        async with asyncio.timeout(ACK_SECONDS):
            await self._done.wait()
        if self._refusal:
            raise ConnectionError(f"an acknowledgement was not taken: {self._refusal}")

    def _place(self) -> str:
        return f"{self._inbox}.{self._batch}"

    async def _hear(self, answer: Msg) -> None:
        if answer.subject != self._place():
            return
        self._refusal = self._refusal or (answer.headers or {}).get("Status", "")  # 503: nobody is there
        self._left -= 1
        if not self._left:
            self._done.set()

    async def close(self) -> None:
        """Nobody answers any more."""
        await self._subscription.unsubscribe()


__all__ = ["Consumer", "Options"]
