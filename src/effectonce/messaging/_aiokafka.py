"""Kafka through aiokafka, with a consumer and a producer that their owner starts and stops."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from aiokafka import ConsumerRebalanceListener, TopicPartition  # type: ignore[import-untyped]
from aiokafka.errors import (  # type: ignore[import-untyped]
    AuthenticationFailedError,
    CommitFailedError,
    KafkaError,
)

from ..errors import StoreUnavailable, UsageError
from ._cursor import check_end
from ._delivery import DeadLetter, Delivery, Verdict
from ._kafka import DEFAULT_POLL_SECONDS, Pauses, Place, Record, delivery_of, is_refusal, pieces, plan
from ._letters import labels

if TYPE_CHECKING:
    from ._cursor_mode import Cursors

LARGEST = 1 << 20
"""What a producer sends at most, unless it is told otherwise."""


class AioKafka:
    """A member of a group, as the loop sees it."""

    awaits = True
    away: tuple[type[Exception], ...] = (KafkaError, OSError)
    in_order = True
    cursors: Cursors | None = None

    def __init__(self, consumer: Any, topics: list[str], producer: Any, dead: str, wanted: Any) -> None:
        if consumer._enable_auto_commit:
            raise UsageError(
                "This consumer commits by itself, also what is not done yet. Make it with enable_auto_commit=False."
            )
        if not consumer._group_id:
            raise UsageError("This consumer is in no group, so it can't commit. Make it with group_id=.")
        if producer is None:
            raise UsageError(
                "What can't be processed is produced to another topic: give an AIOKafkaProducer, producer=."
            )
        self._consumer, self._producer = consumer, producer
        self.group = str(consumer._group_id)
        self._topics, self._dead, self._wanted = topics, dead, wanted
        poll_ms = getattr(consumer, "_max_poll_interval_ms", DEFAULT_POLL_SECONDS * 1000)
        self.deadline: float | None = poll_ms / 1000
        self._pauses = Pauses()
        self._is_parked = False
        self._trouble: Exception | None = None
        self._placed: dict[Any, int] = {}
        """Partitions whose cursors are known, and what these were."""
        self._early: dict[Any, int] = {}
        """The first offset that came of others."""

    @property
    def is_let_in(self) -> bool:
        """Whether partitions were assigned: until then an empty poll says nothing."""
        return bool(self._consumer.assignment())

    def refuses(self, error: Exception) -> bool:
        return is_refusal(error) or isinstance(error, AuthenticationFailedError)

    async def open(self) -> None:
        self._trouble = None
        if set(self._topics) != set(self._consumer.subscription()):
            self._consumer.subscribe(self._topics, listener=_Listener(self))
            return
        # Again, after the broker was away: from what is committed.
        self._consumer.resume(*self._consumer.assignment())
        self._pauses.forget(self._pauses.resting())
        await self._consumer.seek_to_committed()
        await self.take(self._consumer.assignment())

    async def take(self, assigned: Iterable[TopicPartition]) -> None:
        """Have partitions delivered from where their cursors are, whatever the group has committed."""
        if self.cursors is None:
            return
        places = {Place(each.topic, each.partition): each for each in assigned}
        try:
            lows = await self.cursors.take(map(str, places))
            begun = [where for place, where in places.items() if lows[str(place)]]
            ends = await self._consumer.end_offsets(begun) if begun else {}
            for place, where in places.items():
                low, early = lows[str(place)], self._early.pop(where, None)
                check_end(place, low, ends.get(where, low))
                if low or early is not None:
                    self._consumer.seek(where, low or early)
                self._placed[where] = low
        except Exception as error:  # raised where somebody hears it: the client's own task would only log it
            self._trouble = error

    def give(self, revoked: Collection[TopicPartition]) -> None:
        """They are somebody else's now."""
        places = [Place(each.topic, each.partition) for each in revoked]
        self._pauses.forget(places)
        for where in revoked:
            self._placed.pop(where, None)
            self._early.pop(where, None)
        if self.cursors is not None:
            self.cursors.forget(map(str, places))

    def _only_placed(self, found: dict[Any, list[Any]], before: set[Any]) -> dict[Any, list[Any]]:
        """What was fetched from where cursors are. The client fetches as soon as a partition is assigned."""
        for where in [each for each in found if each not in before]:
            first = found.pop(where)[0].offset
            if where in self._placed:  # meanwhile: nobody can tell from where these were fetched
                self._consumer.seek(where, self._placed[where] or first)
            else:
                self._early.setdefault(where, first)
        return found

    async def floor(self, source: str) -> int:
        """Nothing is done out of turn in a partition."""
        return 0

    async def fetch(self, most: int) -> Sequence[Delivery]:
        now = time.monotonic()
        due = [TopicPartition(*place) for place in self._pauses.due(now)]
        assigned = self._consumer.assignment()
        if self._is_parked:
            resting = {TopicPartition(*place) for place in self._pauses.resting()}
            due, self._is_parked = list(assigned - resting), False
        if due := [place for place in due if place in assigned]:
            self._consumer.resume(*due)
        wait_ms = int(self._pauses.wait(now) * 1000)
        before = set(self._placed)
        held = None if self.cursors is None else self.cursors.taken()
        found = await self._consumer.getmany(timeout_ms=wait_ms, max_records=most)
        if self.cursors is not None:
            found = self._only_placed(found, before)
        # The partitions are taken again when it is opened again.
        if isinstance(self._trouble, StoreUnavailable):
            raise ConnectionError(str(self._trouble)) from self._trouble
        if self._trouble is not None:
            raise self._trouble
        deliveries = [
            delivery_of(_record(record), self._wanted) for records in found.values() for record in records
        ]
        if self.cursors is not None and held is not None:
            self.cursors.check_fetched(deliveries, held)
        return deliveries

    async def settle(self, settled: Sequence[tuple[Delivery, Verdict]]) -> None:
        planned = plan(settled)
        await self._put_aside(planned.letters)
        now = time.monotonic()
        assigned = self._consumer.assignment()
        done = {TopicPartition(*place): offset for place, offset in planned.commits.items()}
        done = {place: offset for place, offset in done.items() if place in assigned}
        try:
            if done:
                await self._consumer.commit(done)
        except CommitFailedError:  # the partitions are somebody else's by now, who will find it done
            return
        assigned = self._consumer.assignment()
        for place, (offset, delay) in planned.again.items():
            where = TopicPartition(*place)
            if where in assigned:
                self._consumer.seek(where, offset)
                self._consumer.pause(where)
                self._pauses.rest(place, now + delay)

    async def _put_aside(self, letters: list[tuple[Delivery, DeadLetter]]) -> None:
        largest = getattr(self._producer, "_max_request_size", LARGEST)
        for delivery, letter in letters:
            record: Record = delivery.handle
            topic = self._dead or f"{record.place.topic}.dead"
            for value, headers in pieces(record, labels(letter, delivery), largest):
                await self._producer.send_and_wait(topic, value, key=record.key, headers=headers)

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """Ask for something, so that the group sees that we live; but for nothing that we would have to take."""
        assigned = self._consumer.assignment()
        if assigned:
            self._consumer.pause(*assigned)
            self._is_parked = True
            await self._consumer.getmany(timeout_ms=0)

    async def close(self) -> None:
        """Leave the partitions to others; the client is its owner's."""
        self._consumer.unsubscribe()


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    """Tells which partitions come and go. A new one begins at what is committed, or at its cursor."""

    def __init__(self, broker: AioKafka) -> None:
        self._broker = broker

    # The client calls these, or awaits them, but says only the former.
    async def on_partitions_revoked(self, revoked: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._broker.give(revoked)

    async def on_partitions_assigned(self, assigned: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        await self._broker.take(assigned)


def _record(record: Any) -> Record:
    place = Place(record.topic, record.partition)
    sent = record.timestamp / 1000 if record.timestamp is not None and record.timestamp >= 0 else None
    return Record(place, record.offset, record.key, record.value, record.headers, sent)
