"""Atomic mode with a cursor: what is done of an ordered source is one row, which moves in the effects' transaction.

    begin -> handler(message, connection) … -> compare-and-set of the cursor -> commit -> acks

A batch costs three statements more than its effects do, however many messages it has. Handlers run without savepoints
of their own: when one raises, the transaction is rolled back, those before it are run again and committed, and its
failure is counted with them. What is not in the transaction may so happen again, as everywhere.

A source that keeps its order (a Kafka partition) has one consumer at a time, which takes its row when it is assigned,
and remembers it: whoever still works on an earlier assignment finds another version there, and has done nothing. A
source that does not (a JetStream stream, whose messages come again one by one) may have several: they take turns.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .._messages import Outcome
from .._records import make
from ..batch import Slot
from ..errors import AttemptsExhausted, LeaseLost, StoreMismatch, StoreUnavailable, UsageError
from ..hooks import EventKind
from ..transactions._flow import ended_meanwhile, invoked
from ..transactions.base import SavepointGone, is_lost, is_retryable
from ._atomic import (
    Atomic,
    Begin,
    Unfit,
    Work,
    attempt_of,
    check_colour,
    held,
    in_transaction,
    is_away,
    unanswered,
    used_up,
)
from ._cursor import Cursor, check_begin
from ._delivery import DONE, DeadLetter, Delivery, Held
from .cursors import LONGEST_NAME, Rows, Taken

if TYPE_CHECKING:
    from .._colours import Colour
    from .._receiver import Receiver

T = TypeVar("T")

Piece = Sequence[tuple[Slot, Delivery]]
log = logging.getLogger("effectonce.messaging")

NOT_HANDLED = frozenset({DeadLetter, Outcome})
MANY_RANGES = 64
"""When so much is done out of turn, the broker is asked what will never come."""


class OrderedBroker(Protocol):
    """What a broker has besides, for its sources to have cursors."""

    awaits: bool
    group: str
    in_order: bool
    """Whether a source's messages are delivered in order, to one consumer at a time."""
    cursors: Cursors | None
    """Set by the consumer, if it has them."""

    async def floor(self, source: str) -> int:
        """The number below which nothing will be delivered any more, as far as the broker knows."""
        ...


class Raised(Exception):
    """A handler raised, so that its transaction has to be rolled back."""

    def __init__(self, place: int, error: Exception) -> None:
        super().__init__(place)
        self.place, self.error = place, error


class Moved(Exception):
    """The row is not the one that was read."""


class Cursors(Atomic):
    """Has batches handled in transactions that move cursors."""

    def __init__(self, receiver: Receiver, begin: Begin, concurrency: int, broker: OrderedBroker) -> None:
        super().__init__(receiver, begin, concurrency)
        self._consumer = receiver.consumer or broker.group
        if not 0 < len(self._consumer) <= LONGEST_NAME:
            raise UsageError(
                "A cursor belongs to somebody: Receiver(consumer=…), a name of 255 characters at most."
            )
        self._broker = broker
        self._taken: dict[str, Taken] = {}

    # For brokers

    async def take(self, sources: Iterable[str]) -> dict[str, int]:
        """Begin with sources: whoever had them is fenced. Where each goes on; 0: wherever the broker says."""
        names = sorted(sources)

        async def body(rows: Rows) -> dict[str, Taken]:
            return {source: await rows.take(source) for source in names}

        try:
            taken = await self._with_rows(body)
        except Unfit as unfit:
            raise unfit.why from unfit
        except Exception as error:
            if isinstance(error, StoreUnavailable) or not is_away(error):
                raise
            raise StoreUnavailable("The cursors can't be read: the database gives no answer.") from error
        self._taken.update(taken)
        return {source: each.cursor.low for source, each in taken.items()}

    def taken(self) -> dict[str, Taken]:
        """The rows that are held now, to be given to ``check_fetched`` after a fetch."""
        return self._taken.copy()

    def check_fetched(self, deliveries: Iterable[Delivery], before: dict[str, Taken]) -> None:
        """Raise if a fetch went back behind a row that was held all the while: then its source was made again."""
        for delivery in deliveries:
            source, number = place_of(delivery)
            row = before.get(source)
            if row is not None and number < row.cursor.low and self._taken.get(source) is row:
                check_begin(source, row.cursor.low, number)

    def forget(self, sources: Iterable[str]) -> None:
        """They are somebody else's now."""
        for source in sources:
            self._taken.pop(source, None)

    # For the consumer

    def lane_of(self, delivery: Delivery) -> Hashable:
        """What shares a cursor with it."""
        return place_of(delivery)[0]

    def cut(self, work: Sequence[Work], deliveries: Sequence[Delivery]) -> list[Work]:
        """Hold back what comes after a message that is to be put aside: no cursor may pass it before it is."""
        if not self._broker.in_order or NOT_HANDLED.isdisjoint(map(type, work)):
            return list(work)
        stopped: set[str] = set()
        found: list[Work] = []
        for each, delivery in zip(work, deliveries, strict=True):
            source, _ = place_of(delivery)
            found.append(held() if source in stopped else each)
            if isinstance(each, DeadLetter | Outcome):
                stopped.add(source)
        return found

    async def pass_over(self, letters: Iterable[Delivery]) -> None:
        """Count as done what was put aside. Where that can't be written, it comes again, and is put aside again."""
        for delivery in letters:
            source, number = place_of(delivery)

            async def done(_: Rows, before: Taken, number: int = number) -> tuple[None, Cursor]:
                return None, self._done(before.cursor, number)

            try:
                if taken := self._taken.get(source):
                    await self._moving(source, taken, done)
            except Exception as error:
                log.info("%s is put aside, but its cursor stays: %s", source, type(error).__name__)

    async def handle(self, colour: Colour, piece: Piece, handler: Callable[..., Any]) -> list[Outcome[Any]]:
        """Handle what shares a cursor."""
        source, _ = place_of(piece[0][1])
        outcomes: list[Outcome[Any]] = []
        try:
            if source not in self._taken:
                await self.take([source])
            taken = self._taken[source]
            while len(outcomes) < len(piece):
                some, taken = await self._stretch(source, taken, piece[len(outcomes) :], handler)
                outcomes += some
                if self._broker.in_order and outcomes[-1].status not in DONE:
                    outcomes += [held()] * (len(piece) - len(outcomes))
        except Exception as error:
            if not is_away(error):
                raise
            outcomes += [unanswered(error)] * (len(piece) - len(outcomes))
        return outcomes

    async def _stretch(
        self, source: str, taken: Taken, piece: Piece, handler: Callable[..., Any]
    ) -> tuple[list[Outcome[Any]], Taken]:
        """Handle some messages in one transaction, up to one that fails; then its outcome is the last."""
        end, failure = len(piece), None
        while True:
            work = _Work(self, piece[:end], handler, (*piece[end], failure) if failure else None)
            try:
                outcomes, taken = await self._moving(source, taken, work.run)
                work.tell(outcomes)
                return outcomes, taken
            except Raised as raised:
                end, failure = raised.place, raised.error
            except Moved:
                found = await self._with_rows(lambda rows: rows.lock(source))
                if found.fence != taken.fence:
                    self._lose(source, taken)
                    return [_fenced(source)] * len(piece), taken
                taken = found  # it was moved by a commit of our own, whose reply got lost
            except (Unfit, StoreMismatch):
                raise
            except Exception as error:
                if is_away(error) or not end:
                    return [unanswered(error)] * len(piece), taken
                # It can't be committed, and nobody says whose fault that is: half of them, or this one's failure.
                end, failure = end // 2, error if end == 1 else None

    # Transactions

    async def _moving(
        self, source: str, taken: Taken, work: Callable[[Rows, Taken], Awaitable[tuple[T, Cursor]]]
    ) -> tuple[T, Taken]:
        """Do some work in a transaction that moves a cursor; ``Moved`` if somebody else has done so."""
        in_order, floor = self._broker.in_order, 0
        if not in_order and len(taken.cursor.above) > MANY_RANGES:
            floor = await self._broker.floor(source)

        async def body(rows: Rows) -> tuple[T, Taken]:
            before = taken
            # On SQLite a change has to come first: drivers begin by it, and a savepoint without that is a commit.
            if not in_order or rows.adapter.dialect == "sqlite":
                before = await rows.lock(source)
                if in_order and before.version != taken.version:
                    raise Moved
            result, cursor = await work(rows, before._replace(cursor=before.cursor.raised(floor)))
            moved = before if cursor == before.cursor else await rows.move(source, before, cursor)
            if moved is None:
                raise Moved
            return result, moved

        result, moved = await self._with_rows(body)
        # None if it was given away meanwhile, with another fence if it came back.
        known = self._taken.get(source)
        if known is not None and (not in_order or known.fence == moved.fence):
            self._taken[source] = moved
        return result, moved

    def _lose(self, source: str, taken: Taken) -> None:
        """Somebody else has begun with it. If it is delivered here again, it is taken anew."""
        known = self._taken.get(source)
        if known is not None and known.fence == taken.fence:
            del self._taken[source]

    async def _with_rows(self, body: Callable[[Rows], Awaitable[T]]) -> T:
        receiver = self._receiver
        colour: Colour = receiver.asyncio if self._broker.awaits else receiver.blocking

        async def opened(connection: Any) -> T:
            try:
                rows = Rows(connection, self._consumer)
            except UsageError as error:
                raise Unfit(error) from error
            check_colour(colour, rows.adapter.awaits)
            return await body(rows)

        return await in_transaction(colour, self._begin, opened)

    def _done(self, cursor: Cursor, number: int) -> Cursor:
        """In order, what lies between is passed over: those numbers will not come."""
        return cursor.raised(number + 1) if self._broker.in_order else cursor.add(number)


class _Work:
    """Handlers to be run in one transaction, and one that has failed before it, to be counted."""

    def __init__(
        self,
        cursors: Cursors,
        piece: Piece,
        handler: Callable[..., Any],
        failed: tuple[Slot, Delivery, Exception] | None,
    ) -> None:
        self._cursors, self._piece, self._handler, self._failed = cursors, piece, handler, failed
        self._flow = cursors._receiver.flow

    async def run(self, rows: Rows, before: Taken) -> tuple[list[Outcome[Any]], Cursor]:
        """Run them; how far that brings the cursor."""
        cursor, outcomes, name = before.cursor, [], None
        for place, (slot, delivery) in enumerate(self._piece):
            _, number = place_of(delivery)
            if cursor.has(number):
                outcomes.append(make(Outcome, ("replayed", None, True, 0, before.fence, "atomic", None)))
            elif cursor.is_full() and number != cursor.low:
                outcomes.append(held())
            else:
                if name is None:
                    name = rows.adapter.new_name()
                    await rows.adapter.savepoint(name)
                outcomes.append(await self._one(place, slot, rows, before.fence, cursor.tries_of(number)))
                cursor = self._cursors._done(cursor, number)
        if name is not None:
            try:
                await rows.adapter.release(name)
            except SavepointGone as gone:
                # What was committed so is not in the cursor, and would happen again with every delivery.
                raise Unfit(ended_meanwhile(self._piece[-1][0][0].key)) from gone
        return self._with_failure(outcomes, cursor, before.fence)

    async def _one(self, place: int, slot: Slot, rows: Rows, fence: int, tries: int) -> Outcome[Any]:
        call, (message,) = slot
        if (exhausted := used_up(call, tries)) is not None:
            raise Raised(place, exhausted)
        attempt = attempt_of(self._flow, call, fence, tries + 1)
        try:
            value = await invoked(self._colour(rows), attempt, self._handler, (message, rows.connection), {})
        except Exception as error:
            # Its cause is what the engine asks to run the transaction again for, and no other's trouble.
            raise Raised(place, error) from (error if _is_the_engines(error) else None)
        finally:
            attempt.end(None)
        return make(Outcome, ("executed", value, False, tries + 1, fence, "atomic", None))

    def _colour(self, rows: Rows) -> Colour:
        receiver = self._cursors._receiver
        return receiver.asyncio if rows.adapter.awaits else receiver.blocking

    def _with_failure(
        self, outcomes: list[Outcome[Any]], cursor: Cursor, fence: int
    ) -> tuple[list[Outcome[Any]], Cursor]:
        if self._failed is None:
            return outcomes, cursor
        _, delivery, error = self._failed
        _, number = place_of(delivery)
        if not isinstance(error, AttemptsExhausted):
            cursor = cursor.failed(number)
        outcomes.append(Outcome("failed", None, False, cursor.tries_of(number), fence, "atomic", error))
        return outcomes, cursor

    def tell(self, outcomes: Sequence[Outcome[Any]]) -> None:
        """Count what has been committed, and tell whoever listens."""
        slots = [slot for slot, _ in self._piece] + ([] if self._failed is None else [self._failed[0]])
        for (call, _), outcome in zip(slots, outcomes, strict=True):
            kind = KINDS.get(outcome.status)
            if kind is not None and not isinstance(outcome.error, Held):
                detail = "" if outcome.error is None else type(outcome.error).__name__
                self._flow.tell(kind, call.key, outcome.fence, outcome.attempt, "atomic", detail)


KINDS: dict[str, EventKind] = {"executed": "completed", "replayed": "replayed", "failed": "released"}


def place_of(delivery: Delivery) -> tuple[str, int]:
    """Its place, which every delivery of an ordered broker has."""
    assert delivery.at is not None
    return delivery.at


def _is_the_engines(error: Exception) -> bool:
    """Whether a handler's error is about its transaction. A connection to somebody else may break, too."""
    return is_retryable(error) or (is_lost(error) and not isinstance(error, OSError | EOFError))


def _fenced(source: str) -> Outcome[Any]:
    why = f"Another consumer has begun with {source} since. What was done here is rolled back."
    return Outcome("failed", error=LeaseLost(why), guarantee="atomic")
