"""Kafka through confluent-kafka, with a client that is made here: its Consumer, or its AIOConsumer on an event loop.

Both clients have the same methods; those of the second are awaited. So there is one body for both: ``done`` awaits what
has to be awaited.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .._blocking import run
from .._records import make
from ..errors import MissingExtra, StoreUnavailable, UsageError
from ._consumer import done
from ._cursor import check_end
from ._delivery import DeadLetter, Delivery, Verdict
from ._kafka import DEFAULT_POLL_SECONDS, Pauses, Place, Record, delivery_of, is_refusal, pieces, plan
from ._letters import labels

try:
    import confluent_kafka as kafka
    from confluent_kafka import KafkaError, KafkaException, TopicPartition
except ImportError as error:
    raise MissingExtra("Kafka needs the package confluent-kafka: pip install effectonce[kafka]") from error

if TYPE_CHECKING:
    from ._cursor_mode import Cursors

T = TypeVar("T")

log = logging.getLogger("effectonce.messaging")

DELIVERY_SECONDS = 30.0
ASK_SECONDS = 10.0
LARGEST = 1_000_000
"""What a producer sends at most, unless it is told otherwise."""
OF_CONSUMERS = (
    "group.",
    "enable.auto.",
    "auto.",
    "fetch.",
    "max.poll.",
    "session.",
    "heartbeat.",
    "partition.",
    "isolation.",
)
"""What a consumer's configuration has and a producer's has not."""


class Confluent:
    """A member of a group, as the loop sees it. The lock is for the heartbeat, which polls beside the handlers."""

    away: tuple[type[Exception], ...] = (KafkaException, OSError)
    in_order = True
    cursors: Cursors | None = None

    def __init__(self, configuration: dict[str, Any], topics: list[str], dead: str, wanted: Any) -> None:
        for name in ("enable.auto.commit", "enable.auto.offset.store"):
            if str(configuration.get(name, "false")).lower() != "false":
                raise UsageError(
                    f"{name} would commit what is not done yet. Leave it out: offsets are committed here."
                )
        if "group.id" not in configuration:
            raise UsageError('The configuration has no "group.id", which names who consumes.')
        self.group = str(configuration["group.id"])
        own = {"enable.auto.commit": False, "enable.auto.offset.store": False}
        self._configuration = {"auto.offset.reset": "earliest", **configuration, **own}
        strategy = str(configuration.get("partition.assignment.strategy", ""))
        self._is_incremental = "cooperative" in strategy or configuration.get("group.protocol") == "consumer"
        self._topics, self._dead, self._wanted = topics, dead, wanted
        poll_ms = float(configuration.get("max.poll.interval.ms", DEFAULT_POLL_SECONDS * 1000))
        self.deadline: float | None = poll_ms / 1000
        self._consumer: Any = None
        self._producer: Any = None
        self._forget_all()
        self.use(awaits=False)

    def use(self, *, awaits: bool) -> None:
        """Choose the client, before anything is opened."""
        self.awaits = awaits
        self._lock = _Lock(awaits)

    def _forget_all(self) -> None:
        self._pauses, self._assigned, self._is_parked = Pauses(), set[Place](), False
        self._fresh: set[Place] = set()
        self._trouble: Exception | None = None

    @property
    def is_let_in(self) -> bool:
        """Whether partitions were assigned: until then an empty poll says nothing."""
        return bool(self._assigned)

    def refuses(self, error: Exception) -> bool:
        return is_refusal(error)

    async def open(self) -> None:
        await self.close()
        async with self._lock:
            self._forget_all()
            settings = self._configuration | {"error_cb": self._called(self._hear)}
            self._consumer = _aio_consumer(settings) if self.awaits else kafka.Consumer(settings)
            take, give = self._called(self._take), self._called(self._give)
            await done(self._consumer.subscribe(self._topics, on_assign=take, on_revoke=give, on_lost=give))

    def _called(self, coroutine: Callable[..., Any]) -> Callable[..., Any]:
        """What the client may call back: coroutine functions, or plain ones."""
        return coroutine if self.awaits else lambda *args: run(coroutine(*args))

    async def _hear(self, error: KafkaError) -> None:
        """What a poll does not tell: that we are not let in."""
        refusal = KafkaException(error)
        if self.refuses(refusal) and not self._assigned:  # else it is one broker of several
            self._trouble = self._trouble or refusal
        if (own := self._configuration.get("error_cb")) is not None:
            await done(own(error))
        else:  # nor does the client log it any more
            log.warning("Kafka can't be reached: %s", error.str())

    async def _take(self, client: Any, partitions: list[TopicPartition]) -> None:
        places = {Place(each.topic, each.partition) for each in partitions}
        self._assigned |= places
        self._fresh |= places
        if self.cursors is None:
            return
        try:
            await self._begin_at(partitions, await self.cursors.take(map(str, places)))
        except Exception as error:  # raised where somebody hears it: this may be the heartbeat's poll
            self._trouble = error

    async def _begin_at(self, partitions: list[TopicPartition], lows: dict[str, int]) -> None:
        """Have partitions delivered from where their cursors are, whatever the group has committed."""
        for each in partitions:
            low = lows[str(Place(each.topic, each.partition))]
            if low:
                where = TopicPartition(each.topic, each.partition)
                _, end = await done(self._consumer.get_watermark_offsets(where, timeout=ASK_SECONDS))
                check_end(Place(each.topic, each.partition), low, end)
                each.offset = low
        assign = self._consumer.incremental_assign if self._is_incremental else self._consumer.assign
        await done(assign(partitions))

    async def _give(self, client: Any, partitions: list[TopicPartition]) -> None:
        given = {Place(each.topic, each.partition) for each in partitions}
        self._assigned -= given
        self._fresh -= given
        self._pauses.forget(given)
        if self.cursors is not None:
            self.cursors.forget(map(str, given))

    async def floor(self, source: str) -> int:
        """Nothing is done out of turn in a partition."""
        return 0

    async def fetch(self, most: int) -> Sequence[Delivery]:
        async with self._lock:
            held = None if self.cursors is None else self.cursors.taken()
            found = [delivery_of(record, self._wanted) for record in await self._poll(most)]
            if self.cursors is not None and held is not None:
                self.cursors.check_fetched(found, held)
            return found

    async def _poll(self, most: int) -> list[Record]:
        now = time.monotonic()
        # The client keeps a partition paused that was so when it was given away, also if it comes back.
        due, self._fresh = self._fresh.union(self._pauses.due(now)), set()
        if self._is_parked:
            due, self._is_parked = self._assigned - self._pauses.resting(), False
        if due:
            await done(self._consumer.resume([_at(place) for place in due]))
        first = await done(self._consumer.poll(self._pauses.wait(now)))
        found = [] if first is None else [first]
        if found and most > 1:  # what has arrived already: to wait for more would hold up the first
            found += await done(self._consumer.consume(most - 1, timeout=0))
        self._raise_trouble()
        return [self._record(message) for message in found if self._is_record(message)]

    def _raise_trouble(self) -> None:
        """Raise what went wrong when partitions were taken. A database that is away has the group joined anew."""
        trouble = self._trouble
        if isinstance(trouble, StoreUnavailable):
            raise ConnectionError(str(trouble)) from trouble
        if trouble is not None:
            raise trouble

    def _is_record(self, message: Any) -> bool:
        error = message.error()
        if error is None:
            return True
        if error.code() == KafkaError._PARTITION_EOF:
            return False
        raise KafkaException(error)

    def _record(self, message: Any) -> Record:
        kind, milliseconds = message.timestamp()
        sent = None if kind == kafka.TIMESTAMP_NOT_AVAILABLE else milliseconds / 1000
        place = make(Place, (message.topic(), message.partition()))
        headers = message.headers() or ()
        return make(Record, (place, message.offset(), message.key(), message.value(), headers, sent))

    async def settle(self, settled: Sequence[tuple[Delivery, Verdict]]) -> None:
        planned = plan(settled)
        if planned.letters:
            await self._apart(lambda: self._put_aside(planned.letters))
        async with self._lock:
            commits = [
                _at(place, offset) for place, offset in planned.commits.items() if place in self._assigned
            ]
            if commits:
                await done(self._consumer.commit(offsets=commits, asynchronous=False))
            await self._go_back(planned.again)

    async def _go_back(self, again: dict[Place, tuple[int, float]]) -> None:
        """Have what comes again delivered after its pause."""
        now = time.monotonic()
        for place, (offset, delay) in again.items():
            if place in self._assigned:
                await done(self._consumer.seek(_at(place, offset)))
                await done(self._consumer.pause([_at(place)]))
                self._pauses.rest(place, now + delay)

    async def _apart(self, work: Callable[[], T]) -> T:
        """Do what blocks: a producer has no methods that are awaited and take headers."""
        return await asyncio.to_thread(work) if self.awaits else work()

    def _put_aside(self, letters: list[tuple[Delivery, DeadLetter]]) -> None:
        if self._producer is None:
            self._producer = kafka.Producer(self._of_producers())
        troubles: list[Any] = []

        def told(error: Any, _: Any) -> None:
            if error is not None:
                troubles.append(error)

        self._produce_letters(letters, on_delivery=told)
        left = self._producer.flush(DELIVERY_SECONDS)
        if left or troubles:
            raise KafkaException(troubles[0] if troubles else KafkaError(KafkaError._TIMED_OUT))

    def _produce_letters(self, letters: list[tuple[Delivery, DeadLetter]], **more: Any) -> None:
        for delivery, letter in letters:
            record: Record = delivery.handle
            topic = self._dead or f"{record.place.topic}.dead"
            for value, headers in pieces(record, labels(letter, delivery), self.largest):
                self._producer.produce(topic, value, record.key, headers=headers, **more)

    @property
    def largest(self) -> int:
        """How many bytes a record may have that is produced here."""
        return int(self._configuration.get("message.max.bytes", LARGEST))

    def _of_producers(self) -> dict[str, Any]:
        return {k: v for k, v in self._configuration.items() if not k.startswith(OF_CONSUMERS)}

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """Ask for something, so that the group sees that we live; but for nothing that we would have to take."""
        async with self._lock:
            if not self._is_parked and self._assigned:
                await done(self._consumer.pause([_at(place) for place in self._assigned]))
                self._is_parked = True
            message = await done(self._consumer.poll(0))
            if message is not None and message.error() is None:
                where = TopicPartition(message.topic(), message.partition(), message.offset())
                await done(self._consumer.seek(where))

    async def close(self) -> None:
        """Leave the group: its other members get the partitions at once."""
        async with self._lock:
            consumer, self._consumer = self._consumer, None
            if consumer is not None:
                await done(consumer.close())


class _Lock:
    """One at a time, of threads or of tasks."""

    def __init__(self, awaits: bool) -> None:
        self._lock: Any = asyncio.Lock() if awaits else threading.Lock()

    async def __aenter__(self) -> None:
        await done(self._lock.acquire())

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()


def _aio_consumer(configuration: dict[str, Any]) -> Any:
    try:
        from confluent_kafka.aio import AIOConsumer
    except ImportError as error:
        raise MissingExtra(
            "arun() with confluent-kafka needs its AIOConsumer, of 2.13 or newer: pip install -U confluent-kafka. Or "
            "give an AIOKafkaConsumer of aiokafka."
        ) from error
    return AIOConsumer(dict(configuration))


def _at(place: Place, offset: int = kafka.OFFSET_INVALID) -> TopicPartition:
    return TopicPartition(place.topic, place.partition, offset)
