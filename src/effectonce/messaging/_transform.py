"""From Kafka to Kafka: what a handler returns is produced in the transaction that commits the offset of its message.

    fetch -> handlers -> begin -> produce their outputs, dead letters -> offsets -> commit

Nothing is claimed and nothing stored: the group's offset is the record, and Kafka's transaction holds it together with
the outputs. Consumers that read only what is committed see each output once. Two things keep a zombie out. A
transaction names the generation of the group that its records were fetched in, and the broker refuses another one; and
whoever opens a ``transactional.id`` anew ends what its former holder has begun.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import OFFSET_BEGINNING, KafkaException, Producer, TopicPartition

from .._messages import Outcome
from ..batch import Slot
from ..errors import UsageError
from ..transactions._flow import invoked
from ._atomic import Work, attempt_of, held, used_up
from ._confluent import ASK_SECONDS, Confluent
from ._consumer import done
from ._delivery import DONE, SHORTEST_DELAY, Ack, DeadLetter, Delivery, Verdict
from ._kafka import Output, Place, Plan, Record, is_topic, plan
from ._options import check_handler

if TYPE_CHECKING:
    from .._colours import Colour
    from .._receiver import Receiver

log = logging.getLogger("effectonce.messaging")

TRANSACTION_SECONDS: Final = 60.0


class Outputs:
    """Has batches handled by functions from messages to outputs."""

    def __init__(self, receiver: Receiver, concurrency: int, largest: int) -> None:
        self._flow, self._concurrency, self._largest = receiver.flow, concurrency, largest
        self._tries: dict[Hashable, tuple[int, int]] = {}

    def check(self, handler: Callable[..., Any]) -> None:
        """Raise unless a handler takes a message."""
        check_handler(handler)

    async def run(
        self,
        colour: Colour,
        work: Sequence[Work],
        deliveries: Sequence[Delivery],
        handler: Callable[..., Any],
    ) -> list[Outcome[Any] | DeadLetter]:
        """Handle a batch, partitions side by side; outcomes in order, and their values are lists of outputs."""
        lanes: dict[Hashable, list[int]] = {}
        for index, delivery in enumerate(deliveries):
            lanes.setdefault(delivery.group, []).append(index)
        found: list[Outcome[Any] | DeadLetter] = [held()] * len(work)

        async def lane(indexes: list[int]) -> None:
            for index in indexes:
                each = work[index]
                # A dead letter is in the transaction, so it holds up nobody.
                if isinstance(each, Outcome | DeadLetter):
                    found[index] = each
                    continue
                found[index] = outcome = await self._one(colour, each, deliveries[index], handler)
                if outcome.status not in DONE:
                    return

        jobs = [lambda indexes=indexes: lane(indexes) for indexes in lanes.values()]
        _, interrupted = await colour.gather(jobs, self._concurrency)
        if interrupted is not None:
            raise interrupted
        return found

    async def _one(
        self, colour: Colour, slot: Slot, delivery: Delivery, handler: Callable[..., Any]
    ) -> Outcome[Any]:
        call, args = slot
        record: Record = delivery.handle
        offset, tries = self._tries.get(record.place, (-1, 0))
        tries = tries if offset == record.offset else 0
        if (exhausted := used_up(call, tries)) is not None:
            return Outcome("failed", None, False, tries, 0, "atomic", exhausted)
        attempt = attempt_of(self._flow, call, 0, tries + 1)
        try:
            value = self._checked(await invoked(colour, attempt, handler, args, {}))
        except Exception as error:
            self._tries[record.place] = (record.offset, tries + 1)
            self._flow.tell("released", call.key, 0, tries + 1, "atomic", type(error).__name__)
            return Outcome("failed", None, False, tries + 1, 0, "atomic", error)
        finally:
            attempt.end(None)
        self._flow.tell("completed", call.key, 0, tries + 1, "atomic")
        return Outcome("executed", value, False, tries + 1, 0, "atomic")

    def _checked(self, value: Any) -> list[Output]:
        outputs = [] if value is None else [value] if isinstance(value, Output) else list(value)
        for each in outputs:
            if not isinstance(each, Output):
                raise UsageError(
                    f"A handler returned {type(each).__name__}. It returns kafka.Output, several, or None."
                )
            if not is_topic(each.topic):  # the broker would refuse all that is produced with it, each time
                raise UsageError(f"An output is for {each.topic!r:.100}, which can't be the name of a topic.")
            if each.size() > self._largest:
                raise UsageError(f"An output of about {each.size()} bytes is larger than message.max.bytes.")
        return outputs

    async def pass_over(self, letters: Sequence[Delivery]) -> None:
        """Dead letters are in the transaction, too."""


class Transforming(Confluent):
    """A member of a group that commits its offsets with what it produces."""

    def __init__(self, configuration: dict[str, Any], topics: list[str], dead: str, wanted: Any) -> None:
        own = {name: configuration[name] for name in configuration if name.startswith("transaction")}
        if not own.get("transactional.id"):
            raise UsageError(
                'The configuration has no "transactional.id". Give each process one of its own, and the same one when '
                "it is started again: that ends what it may have left unfinished."
            )
        rest = {name: value for name, value in configuration.items() if name not in own}
        super().__init__(rest, topics, dead, wanted)
        if str(rest.get("isolation.level", "read_committed")) != "read_committed":
            raise UsageError(
                '"isolation.level" has to be read_committed, or aborted records would be handled.'
            )
        self._own, self._rebalances = own, 0
        self._generation: Any = None

    async def open(self) -> None:
        self._producer = Producer(self._of_producers() | self._own)
        await self._apart(lambda: self._producer.init_transactions(TRANSACTION_SECONDS))
        await super().open()

    async def _take(self, client: Any, partitions: list[TopicPartition]) -> None:
        self._rebalances += 1
        await super()._take(client, partitions)

    async def _give(self, client: Any, partitions: list[TopicPartition]) -> None:
        self._rebalances += 1
        await super()._give(client, partitions)

    async def _poll(self, most: int) -> list[Record]:
        before = self._rebalances
        found = await super()._poll(most)
        if self._rebalances != before:  # nobody can tell in which generation each of them was fetched
            await self._go_to_committed(found)
            return []
        self._generation = await done(self._consumer.consumer_group_metadata())
        return found

    async def settle(self, settled: Sequence[tuple[Delivery, Verdict]]) -> None:
        planned = plan(settled)
        outputs = [each for _, verdict in settled if isinstance(verdict, Ack) for each in verdict.value or ()]
        try:
            if planned.commits:
                await self._apart(lambda: self._commit(planned, outputs))
        except KafkaException as error:
            if error.args[0].fatal():  # somebody else has the transactional.id now: begin anew
                raise
            log.warning("a transaction is rolled back, its records come again: %s", error)
            await self._apart(lambda: self._producer.abort_transaction(TRANSACTION_SECONDS))
            async with self._lock:
                await self._go_to_committed([delivery.handle for delivery, _ in settled])
            return
        async with self._lock:
            await self._go_back(planned.again)

    async def _go_to_committed(self, records: Sequence[Record]) -> None:
        """Have records again that are not done. Only the group knows how far others have come with them meanwhile."""
        firsts: dict[Place, int] = {}
        for place, offset, *_ in records:
            firsts[place] = min(offset, firsts.get(place, offset))
        asked = [TopicPartition(*place) for place in firsts if place in self._assigned]
        if not asked:
            return
        known = await done(self._consumer.committed(asked, timeout=ASK_SECONDS))
        offsets = {Place(each.topic, each.partition): each.offset for each in known}
        # Where nothing is committed, a partition begins anew with every assignment: at its beginning, mostly.
        is_earliest = self._configuration["auto.offset.reset"] in ("earliest", "smallest", "beginning")
        unknown = dict.fromkeys(firsts, OFFSET_BEGINNING) if is_earliest else firsts
        again = {place: offset if offset >= 0 else unknown[place] for place, offset in offsets.items()}
        await self._go_back({place: (offset, SHORTEST_DELAY) for place, offset in again.items()})

    def _commit(self, planned: Plan, outputs: Iterable[Output]) -> None:
        producer = self._producer
        producer.begin_transaction()
        for topic, value, key, headers in outputs:
            self._produce(topic, value, key, headers=dict(headers))
        self._produce_letters(planned.letters)
        offsets = [TopicPartition(*place, offset) for place, offset in planned.commits.items()]
        producer.send_offsets_to_transaction(offsets, self._generation, TRANSACTION_SECONDS)
        producer.commit_transaction(TRANSACTION_SECONDS)

    def _produce(self, *record: Any, **more: Any) -> None:
        while True:
            try:
                self._producer.produce(*record, **more)
                return
            except BufferError:  # more than it holds at a time
                self._producer.poll(1.0)
