"""Consumers in atomic mode: a batch's records and effects are in one transaction of the user's; the ack comes after it.

    fetch -> begin -> claim all -> handler(message, connection) … -> record all -> commit -> acks

``transaction()`` begins one: a context manager with a connection, which commits when it is left. Messages of one group
(a Kafka partition, a FIFO group) are a transaction of their own, and groups run side by side; all others of a batch are
one transaction together. A handler that raises is undone to its savepoint and spoils nobody else. What spoils the
transaction itself (a constraint that is checked at COMMIT, a handler that rolls it back) has its messages run one by
one. A handler that commits it ends the consumer.
What the engine asks to be run again is run again, whole; a COMMIT without a reply is settled by the records.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from .._answers import Call
from .._messages import Outcome
from .._records import Completion, Decision, State, Verdict
from ..batch import Slot
from ..errors import (
    AttemptsExhausted,
    ColourMismatch,
    EffectOnceError,
    StoreError,
    StoreMismatch,
    StoreUnavailable,
    UsageError,
)
from ..transactions._batch import Piece
from ..transactions._flow import AtomicAttempt, ended_meanwhile
from ..transactions._retrying import TRIES, may_help, pause
from ._delivery import DONE, DeadLetter, Delivery, Held
from ._options import takes

if TYPE_CHECKING:
    from .._colours import Colour
    from .._flow import Flow
    from .._receiver import Receiver

T = TypeVar("T")

Begin = Callable[[], AbstractContextManager[Any] | AbstractAsyncContextManager[Any]]
Work = Slot | Outcome[Any] | DeadLetter
"""What is to be done for a delivery, or what is known of it without: what can't be named, and what can't be read."""
GRANTED = (Verdict.CLAIMED, Verdict.TAKEN_OVER)


class Unfit(Exception):
    """A transaction that nothing can be atomic in: the program's mistake, not a message's."""

    def __init__(self, why: EffectOnceError) -> None:
        super().__init__(str(why))
        self.why = why


class Atomic:
    """Has batches handled in transactions that ``begin()`` begins."""

    def __init__(self, receiver: Receiver, begin: Begin, concurrency: int) -> None:
        if not callable(begin):
            raise UsageError(
                "transaction= is called for each transaction and gives a context manager with a connection: "
                "pool.connection, engine.begin, or a function of yours."
            )
        self._receiver, self._begin, self._concurrency = receiver, begin, concurrency

    def check(self, handler: Callable[..., Any]) -> None:
        """Raise unless a handler takes a message and a connection."""
        if not takes(handler, 2):
            raise UsageError(
                f"{handler!r} has to take two arguments here: def handler(message, connection). Its effects have to go "
                "through that connection, or they are not in the transaction."
            )

    async def run(
        self,
        colour: Colour,
        work: Sequence[Work],
        deliveries: Sequence[Delivery],
        handler: Callable[..., Any],
    ) -> list[Outcome[Any] | DeadLetter]:
        """Handle a batch; outcomes in order."""
        work = self.cut(work, deliveries)
        outcomes: dict[int, Outcome[Any] | DeadLetter] = {}
        members: dict[Hashable, list[int]] = {}
        for index, (each, delivery) in enumerate(zip(work, deliveries, strict=True)):
            if isinstance(each, Outcome | DeadLetter):
                outcomes[index] = each
            else:
                members.setdefault(self.lane_of(delivery), []).append(index)
        pieces = [[(work[index], deliveries[index]) for index in indexes] for indexes in members.values()]
        jobs = [lambda piece=piece: self._guarded(colour, piece, handler) for piece in pieces]
        results, interrupted = await colour.gather(jobs, self._concurrency)
        if interrupted is not None:
            raise interrupted
        for indexes, result in zip(members.values(), results, strict=True):
            if isinstance(result, BaseException):
                raise result
            outcomes.update(zip(indexes, result or (), strict=True))
        return [outcomes[index] for index in range(len(work))]

    def cut(self, work: Sequence[Work], deliveries: Sequence[Delivery]) -> Sequence[Work]:
        """What may be done now."""
        return work

    async def pass_over(self, letters: Sequence[Delivery]) -> None:
        """What was put aside has its record, or none that could be in the way."""

    def lane_of(self, delivery: Delivery) -> Hashable:
        """What shares a transaction with it."""
        return delivery.group

    async def _guarded(self, colour: Colour, piece: Any, handler: Any) -> list[Outcome[Any]] | BaseException:
        """An error is a result here: one that is raised on another thread would be heard by nobody."""
        try:
            return await self.handle(colour, piece, handler)
        except Unfit as unfit:
            return unfit.why
        except Exception as error:
            return error

    async def handle(
        self, colour: Colour, piece: Sequence[tuple[Slot, Delivery]], handler: Callable[..., Any]
    ) -> list[Outcome[Any]]:
        """Handle what shares a transaction; and one by one, if that can't be committed."""
        slots, ordered = [slot for slot, _ in piece], piece[0][1].group is not None
        try:
            return await self._transaction(colour, slots, handler, ordered)
        except Unfit:
            raise
        except Exception as error:
            if is_away(error):
                return [unanswered(error)] * len(slots)
            if key := await self._committed(colour, slots):
                # Its effects without its result: they would happen again with every delivery.
                raise Unfit(ended_meanwhile(key)) from error
            if len(slots) == 1:
                return [await self._counted(colour, slots[0], error)]
        outcomes: list[Outcome[Any]] = []
        for one in piece:
            outcomes += await self.handle(colour, [one], handler)
            if ordered and outcomes[-1].status not in DONE:
                outcomes += [held()] * (len(piece) - len(outcomes))
                break
        return outcomes

    async def _transaction(
        self, colour: Colour, slots: Sequence[Slot], handler: Callable[..., Any], ordered: bool
    ) -> list[Outcome[Any]]:
        async def body(connection: Any) -> list[Outcome[Any]]:
            try:
                on: Any = self._receiver.on(connection)
                on.store.adapter.check()
            except UsageError as error:
                raise Unfit(error) from error
            check_colour(colour, on.store.adapter.awaits)
            kind = _InOrder if ordered else Piece
            mine = on.asyncio if colour.awaits else on.blocking
            outcomes = await kind(on.flow, mine, slots, lambda message: handler(message, connection)).run()
            for outcome in outcomes:
                if isinstance(outcome.error, StoreMismatch):  # no table here: it would be the same for ever
                    raise Unfit(outcome.error)
            return outcomes

        return await in_transaction(colour, self._begin, body)

    async def _committed(self, colour: Colour, slots: Sequence[Slot]) -> str:
        """The key of a claim that is there after its transaction was given up: some handler has committed that."""
        for call, _ in slots:
            try:
                record = await colour.store.get(call.key)
            except StoreError:
                continue
            if record is not None and (record.state, record.owner) == (State.PENDING, call.claim.owner):
                return call.key
        return ""

    async def _counted(self, colour: Colour, slot: Slot, error: Exception) -> Outcome[Any]:
        """The outcome of a message whose transaction can't be committed: a failed attempt, in one that can."""

        def fail(*_: Any) -> Any:
            raise error

        try:
            return (await self._transaction(colour, [slot], fail, ordered=False))[0]
        except Exception:
            return Outcome("failed", error=error, guarantee="atomic")


class _InOrder(Piece):
    """A piece that stops at the first message without a result; what comes after it is given back unbegun."""

    is_stopped = False

    async def _one(self, index: int, decision: Decision | StoreError) -> None:
        if not self.is_stopped:
            await super()._one(index, decision)
            if index in self.ended:
                self.is_stopped = self.ended[index][3] is not None
            else:
                self.is_stopped = self.outcomes[index].status not in DONE
            return
        self.outcomes[index] = held()
        if isinstance(decision, Decision) and decision.verdict in GRANTED and decision.record is not None:
            claim = self.slots[index][0].claim
            release = Completion(
                claim.key, claim.owner, decision.record.fence, State.ABSENT, None, claim.keep, began=False
            )
            await self.colour.store.complete(release)


# Transactions of either colour


async def in_transaction(colour: Colour, begin: Begin, body: Callable[[Any], Awaitable[T]]) -> T:
    """Run ``body(connection)`` in a transaction, and all of it again where that may help."""
    for tried in count(1):
        try:
            async with AsyncExitStack() as stack:
                return await body(await _begun(stack, begin, colour))
        except Exception as error:
            if tried >= TRIES or not may_help(error):
                raise
            await colour.pause(pause(tried, error))
        else:
            raise Unfit(
                UsageError("transaction= keeps errors to itself, so nobody knows what it has committed.")
            )
    raise AssertionError("unreachable")


async def _begun(stack: AsyncExitStack, begin: Begin, colour: Colour) -> Any:
    """The connection of a new transaction. One that can't be begun has not spoiled anything."""
    try:
        manager: Any = begin()
        is_blocking, is_async = hasattr(manager, "__exit__"), hasattr(manager, "__aexit__")
        if not is_blocking and not is_async:
            raise Unfit(
                UsageError(f"transaction= gave {type(manager).__name__}, which is no context manager.")
            )
        if not (is_async if colour.awaits else is_blocking):
            check_colour(colour, is_async)
        return await stack.enter_async_context(manager) if colour.awaits else stack.enter_context(manager)
    except Unfit:
        raise
    except UsageError as error:
        raise Unfit(error) from error
    except Exception as error:
        raise NotBegun(
            f"No transaction could be begun ({type(error).__name__}). Check that the database can be reached."
        ) from error


def check_colour(colour: Colour, awaits: bool) -> None:
    """Raise if a transaction belongs to the other kind of consumer."""
    if awaits and not colour.awaits:
        raise Unfit(
            ColourMismatch(
                "transaction= belongs to an event loop, but this client blocks. Use a blocking one."
            )
        )
    if colour.awaits and not awaits:
        raise Unfit(
            ColourMismatch(
                "transaction= would block the event loop that this client runs on. Use an asyncio driver: "
                "AsyncConnectionPool(…).connection, create_async_engine(…).begin."
            )
        )


class NotBegun(StoreUnavailable):
    """The database is away, or has no connection to spare."""


def is_away(error: BaseException) -> bool:
    """Whether it says nothing of a message: the database is away, or the engine's patience was used up by others."""
    return isinstance(error, StoreUnavailable) or may_help(error)


def unanswered(error: BaseException) -> Outcome[Any]:
    """The outcome of a message whose database gave no answer."""
    if not isinstance(error, StoreError):
        why = f"The transaction could not be committed ({type(error).__name__}), however often it was tried."
        error = StoreUnavailable(why)
    return Outcome("store_error", error=error, guarantee="atomic")


def held() -> Outcome[Any]:
    """The outcome of a message that has to wait for an earlier one."""
    return Outcome("failed", error=Held("An earlier message of its group comes first."))


# Attempts that no claim was granted for


def attempt_of(flow: Flow, call: Call, fence: int, number: int) -> AtomicAttempt:
    """An attempt whose transaction is all there is of it. Its steps run in that, too."""
    attempt = AtomicAttempt(call.claim, fence, number, flow.monotonic(), flow.monotonic)
    attempt.flow, attempt.policy = flow, call.policy
    return attempt


def used_up(call: Call, tries: int) -> AttemptsExhausted | None:
    """The error of a message that may not be tried any more; None if it may."""
    most = call.claim.max_attempts
    if most is None or tries < most:
        return None
    why = f"{tries} attempts failed and no more are allowed. Look at why, then have it sent again."
    return AttemptsExhausted(why, key=call.key)
