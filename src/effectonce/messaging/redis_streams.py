"""Redis and Valkey Streams: a consumer group whose entries are acknowledged when their effects are recorded.

::

    consumer = redis_streams.Consumer(redis.Redis(), "orders", group="billing", receiver=receiver)
    consumer.run(handler)                # with redis.asyncio.Redis(): await consumer.arun(handler)

An entry's id is its field ``id``, else its place in the stream. Its payload is its field ``payload``, decoded; an entry
without that field is a dictionary of its fields. A consumer that died holds its entries until they have been idle for
``idle``; then another takes them over. The same serves as the pause before another delivery: Redis can't put an entry
off for longer, so ``idle`` bounds every pause.
"""

from __future__ import annotations

import inspect
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack
from uuid import uuid4

from .._durations import Duration, seconds
from .._records import make
from ..codec import read_json
from ..errors import MissingExtra, UsageError
from . import _consumer
from ._consumer import Options
from ._delivery import Ack, DeadLetter, Delivery, Nack, Verdict, candidates, or_place
from ._letters import labels
from ._options import check

try:
    import redis
    from redis.exceptions import (
        AuthenticationError,
        AuthorizationError,
        NoPermissionError,
        RedisError,
        ResponseError,
    )
except ImportError as error:
    raise MissingExtra("Redis Streams need the package redis: pip install effectonce[redis]") from error

if TYPE_CHECKING:
    from redis.asyncio import Redis as AsyncRedis

    from .._receiver import Receiver

Fields = dict[bytes, bytes]
LOOKS = 10
"""How often a consumer looks for entries to take over while one goes idle."""
LONGEST_WAIT = 1.0
REFUSALS = ("WRONGTYPE", "unknown command", "NOAUTH", "WRONGPASS")
"""What errors say that have no class of their own."""


class Consumer(_consumer.Consumer):
    """Handles each entry of a stream once.

    client        of redis-py, blocking or of ``redis.asyncio``; it must not decode responses
    group         the consumer group; it is made when it is missing, and begins with the oldest entry
    name          this consumer's, unlike every other's of the group; by default a new one for each run
    idle          how long an entry may be silent before another consumer takes it over
    dead_letter   the stream for what can't be processed; by default the stream's name with ``:dead``
    options       see ``Options``
    """

    def __init__(
        self,
        client: redis.Redis | AsyncRedis,
        stream: str,
        *,
        group: str,
        receiver: Receiver,
        name: str = "",
        idle: Duration = "1m",
        dead_letter: str = "",
        **options: Unpack[Options],
    ) -> None:
        check(receiver, options, dead_letter, stream=stream, group=group)
        if not hasattr(client, "xreadgroup"):
            raise UsageError(f"A {type(client).__name__} is no client of redis-py. Write redis.Redis(…).")
        if _decodes(client):
            raise UsageError(
                "This client decodes responses, so an entry that is not UTF-8 would end the consumer. Make it with "
                "decode_responses=False."
            )
        broker = _Streams(client, stream, group, name, seconds(idle, "idle"), dead_letter or f"{stream}:dead")
        broker.id = options.get("id")
        options["decode"] = _decoding(options.get("decode", read_json))
        super().__init__(broker, receiver, options)


class _Streams:
    """One consumer of a group, as the loop sees it."""

    away: tuple[type[Exception], ...] = (RedisError,)
    is_let_in = True
    id: Any = None

    def __init__(self, client: Any, stream: str, group: str, name: str, idle: float, dead: str) -> None:
        self._client, self._stream, self.group, self._dead = client, stream, group, dead
        self._name, self._is_passing, self._process = name, not name, 0
        self.awaits = inspect.iscoroutinefunction(client.execute_command)
        self.deadline: float | None = idle
        self._idle_ms = max(int(idle * 1000), 1)
        self._look_every = min(idle / LOOKS, LONGEST_WAIT)
        self._patience = _patience(client)
        self._look_at = 0.0
        self._cursor: Any = "0-0"

    def refuses(self, error: Exception) -> bool:
        """Wrong passwords and missing permissions; a key that is no stream; a server without consumer groups."""
        if isinstance(error, AuthenticationError | AuthorizationError | NoPermissionError):
            return True
        return isinstance(error, ResponseError) and any(sign in str(error) for sign in REFUSALS)

    async def open(self) -> None:
        if self._is_passing and self._process != os.getpid():  # so that those who fork have one each
            self._process = os.getpid()
            self._name = f"{socket.gethostname()}-{self._process}-{uuid4().hex[:8]}"
        try:
            await _done(self._client.xgroup_create(self._stream, self.group, id="0", mkstream=True))
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def fetch(self, most: int) -> Sequence[Delivery]:
        if time.monotonic() >= self._look_at:
            taken = await self._take_over(most)
            if len(taken) < most:  # else there are more, and they are the oldest
                self._look_at = time.monotonic() + self._look_every
            if taken:
                return taken
        wait_ms = max(int(min(self._look_every, self._patience) * 1000), 1)
        streams = {self._stream: ">"}
        answer = await _done(
            self._client.xreadgroup(self.group, self._name, streams, count=most, block=wait_ms)
        )
        if isinstance(answer, dict):  # the third protocol's form
            answer = list(answer.items())
        entries = [entry for _, found in answer or () for entry in _flat(found)]
        return [self._delivery(entry_id, fields, 1) for entry_id, fields in entries]

    async def _take_over(self, most: int) -> list[Delivery]:
        """Entries that nobody has spoken of for long, with how often they were delivered."""
        answer = await _done(
            self._client.xautoclaim(
                self._stream, self.group, self._name, self._idle_ms, start_id=self._cursor, count=most
            )
        )
        self._cursor, entries = answer[0], [entry for entry in answer[1] if entry[1]]
        if not entries:
            return []
        pending = await _done(
            self._client.xpending_range(
                self._stream, self.group, entries[0][0], entries[-1][0], len(entries), self._name
            )
        )
        counts = {each["message_id"]: each["times_delivered"] for each in pending}
        return [self._delivery(entry_id, fields, counts.get(entry_id, 2)) for entry_id, fields in entries]

    def _delivery(self, entry_id: bytes, fields: Fields, times: int) -> Delivery:
        found = fields.get(b"id")
        if found is not None and self.id is None:  # the usual one, by the shortest way
            ids: tuple[tuple[str, object], ...] = (("the field id", found),)
        else:
            usual = or_place("the field id", found, *entry_id.decode().split("-"))
            ids = candidates(self.id, fields, lambda name: fields.get(name.encode()), usual)
        size = 0
        for name, value in fields.items():
            size += len(name) + len(value)
        sent = int(entry_id[: entry_id.index(b"-")]) / 1000
        return make(Delivery, (entry_id, self._stream, ids, fields, size, sent, times, None, None))

    async def settle(self, settled: Sequence[tuple[Delivery, Verdict]]) -> None:
        done = [delivery.handle for delivery, verdict in settled if type(verdict) is Ack]
        if len(done) == len(settled):  # nearly every batch: one command, for which a pipeline is too much
            await _done(self._client.xack(self._stream, self.group, *done))
            return
        pipeline = self._client.pipeline(transaction=False)
        if done:
            pipeline.xack(self._stream, self.group, *done)
        for delivery, verdict in settled:
            if isinstance(verdict, Nack):
                idle_ms = max(self._idle_ms - int(verdict.delay * 1000), 0)
                self._hold(pipeline, [delivery.handle], idle_ms)
        letters = [(each, verdict) for each, verdict in settled if isinstance(verdict, DeadLetter)]
        for delivery, letter in letters:
            pipeline.xadd(self._dead, delivery.body | labels(letter, delivery))
        await _done(pipeline.execute())
        if letters:  # put aside first: an entry that is acknowledged is gone from the group
            await _done(self._client.xack(self._stream, self.group, *(each.handle for each, _ in letters)))

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        self._hold(pipeline, [delivery.handle for delivery in deliveries], 0)
        await _done(pipeline.execute())

    def _hold(self, pipeline: Any, entry_ids: list[bytes], idle_ms: int) -> None:
        """Say that entries have been idle for so long. JUSTID: this is no delivery, and is not counted as one."""
        pipeline.xclaim(self._stream, self.group, self._name, 0, entry_ids, idle=idle_ms, justid=True)

    async def close(self) -> None:
        """A name that was made up for this run goes with it, unless entries are still waiting under it."""
        if self._is_passing:
            waiting = await _done(
                self._client.xpending_range(self._stream, self.group, "-", "+", 1, self._name)
            )
            if not waiting:
                await _done(self._client.xgroup_delconsumer(self._stream, self.group, self._name))


async def _done(answer: Any) -> Any:
    """A client's answer: blocking ones have it, others are awaited."""
    return await answer if inspect.isawaitable(answer) else answer


def _flat(found: Any) -> list[tuple[bytes, Fields]]:
    """Entries as redis-py gives them: pairs, in the third protocol inside one more list."""
    return [entry for each in found for entry in (each if isinstance(each, list) else [each])]


def _decoding(decode: Callable[[Any], Any]) -> Callable[[Fields], Any]:
    """The same for entries: one with the field ``payload`` is decoded, any other is what it has."""

    def payload(fields: Fields) -> Any:
        body = fields.get(b"payload")
        if body is not None:
            return decode(body)
        return {name.decode(): value.decode() for name, value in fields.items()}

    return payload


def _setting(client: Any, name: str) -> Any:
    pool = getattr(client, "connection_pool", None)
    return getattr(pool, "connection_kwargs", {}).get(name)


def _decodes(client: Any) -> bool:
    return bool(_setting(client, "decode_responses"))


def _patience(client: Any) -> float:
    """How long the server may wait before it answers that there is nothing: the client must not give up meanwhile."""
    limit = _setting(client, "socket_timeout")
    return limit / 2 if isinstance(limit, int | float) and limit > 0 else LONGEST_WAIT


__all__ = ["Consumer", "Options"]
