"""The loop of every consumer: get some messages, claim and handle them together, tell the broker what became of each.

    fetch -> claim all in one round trip -> handlers -> record all in one round trip -> acks

An ack comes last, so whatever dies earlier is delivered again, and then the claim absorbs it. What a broker can do is a
``Broker``: coroutines that never suspend when its client blocks. So one body serves both colours.

While a batch is under way, a heartbeat extends the broker's deadline for it, as the keeper renews the leases. A batch
is handled with claims in the receiver's store, as above, or in the user's own transactions (``_atomic``), there
perhaps with a cursor in place of records (``_cursor_mode``).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar

from .. import _blocking, batch
from .._durations import Duration, seconds
from .._handlers import check_awaited, is_plain
from .._messages import Message, Outcome
from .._receiver import Receiver
from ..codec import read_json
from ..errors import ColourMismatch, StoreClosed, UsageError
from ..policy import Busy, Policy
from ._atomic import Atomic, Begin, Work
from ._cursor_mode import Cursors
from ._delivery import (
    EXTEND_SHARE,
    Ack,
    DeadLetter,
    Delivery,
    Intake,
    Nack,
    Pace,
    Verdict,
    Watchdog,
    explained,
    message_policy,
    named,
    to_extend,
)
from ._judge import Judge
from ._ordered import Claims
from ._refusals import Refusals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from .._colours import Colour

H = TypeVar("H", bound=Callable[..., Any])

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""While the broker is away."""
STORE_PAUSE = 5.0
"""The longest rest while the store is away."""
LOOK_SECONDS = 0.1
"""How soon a resting consumer hears that it shall stop."""

log = logging.getLogger("effectonce.messaging")


class Options(TypedDict, total=False):
    """What every consumer takes besides its broker's own.

    policy        how messages are treated; by default the receiver's, with a week of memory at least, and a duplicate
                  of a running attempt goes back to the broker instead of being waited for
    batch         how many messages are claimed together, at most
    concurrency   how many handlers run side by side; messages of one group never do
    decode        makes a payload of a body; by default JSON. ``bytes`` leaves it as it is
    id            where the sender's id is: the name of a header, or a function of the client's own message object. Then
                  a message without it is refused. By default the places that the broker has for it, in order
    max_body      a larger message is refused
    retry         the first and the longest pause before another delivery
    transaction   atomic mode: called for each transaction, gives a context manager with a connection, which commits
                  when it is left. Handlers take the message and the connection
    cursor        True: in place of a record per message, one per partition or stream, which the transactions move
    """

    policy: Policy | None
    batch: int
    concurrency: int
    decode: Callable[[Any], Any]
    id: str | Callable[[Any], object] | None
    max_body: int
    retry: tuple[Duration, Duration]
    transaction: Begin | None
    cursor: bool


class Broker(Protocol):
    """A broker as the loop sees it. Its coroutines never suspend unless it ``awaits``."""

    awaits: bool
    away: tuple[type[Exception], ...]
    """What its client raises while it can't be reached."""
    group: str
    """Who consumes, where the broker has a word for it; it names the consumer of a receiver that does not say."""
    deadline: float | None
    """Seconds after which it delivers again what was neither settled nor extended; None: never."""

    @property
    def is_let_in(self) -> bool:
        """Whether a fetch that brings nothing says that there is nothing; not before a group was joined."""
        ...

    def refuses(self, error: Exception) -> bool:
        """Whether an error is no passing trouble: we are not let in, or what is asked for is not there."""
        ...

    async def open(self) -> None:
        """Make ready what is needed; called again after the broker was away."""
        ...

    async def fetch(self, most: int) -> Sequence[Delivery]:
        """Some messages, at most so many. When there are none it waits for a moment, and gives none."""
        ...

    async def settle(self, settled: Sequence[tuple[Delivery, Verdict]]) -> None:
        """Tell the broker. A dead letter is put aside before it is acknowledged."""
        ...

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """Have the broker wait longer. Called beside a running batch, from another thread or task."""
        ...

    async def close(self) -> None:
        """Let go of what was fetched and of what was opened here; the client is its owner's."""
        ...


class Handling(Protocol):
    """How a batch is handled: where it is remembered what was done."""

    def check(self, handler: Callable[..., Any]) -> None:
        """Raise if a handler can't be called as it will be."""
        ...

    async def run(
        self,
        colour: Colour,
        work: Sequence[Work],
        deliveries: Sequence[Delivery],
        handler: Callable[..., Any],
    ) -> list[Outcome[Any] | DeadLetter]:
        """Handle what can be; what became of each delivery, in order."""
        ...

    async def pass_over(self, letters: Sequence[Delivery]) -> None:
        """These were put aside."""
        ...


class Consumer:
    """Handles each message once. Adapters give it its ``Broker``."""

    def __init__(self, broker: Broker, receiver: Receiver, options: Options) -> None:
        unknown = set(options) - set(Options.__annotations__)
        if unknown:
            raise UsageError(f"{', '.join(sorted(unknown))}: a consumer has no such option.")
        self._broker, self._receiver = broker, receiver
        begin = options.get("transaction")
        # In a transaction the engine is what waits for a duplicate, and others' transactions are short.
        busy: Busy = "reject" if begin is None else "wait"
        self.policy = message_policy(receiver.policy, options.get("policy"), busy)
        self._size = options.get("batch", batch.DEFAULT_SIZE)
        self._concurrency = options.get("concurrency", batch.DEFAULT_CONCURRENCY)
        self._intake = Intake(options.get("decode", read_json), options.get("max_body", 1 << 20))
        first, longest = options.get("retry", ("1s", "5m"))
        pace = Pace(seconds(first, "retry"), seconds(longest, "retry"))
        self._handling: Handling = self._chosen_handling(begin, options.get("cursor", False))
        # What a crash has rolled back is new to the store when it comes again, up to a batch at a time.
        watchdog = Watchdog() if begin is None else Watchdog(threshold=2 * self._size + 20)
        self._judge = Judge(receiver, self.policy, pace, watchdog, broker.group)
        self._refusals = Refusals(receiver.flow.monotonic)
        self._handler: Callable[..., Any] | None = None
        self._stopping, self._turn = threading.Event(), threading.Lock()
        self._under_way: tuple[Sequence[Work], Sequence[Delivery]] = ((), ())
        self._held: set[str] = set()

    def _chosen_handling(self, begin: Begin | None, cursor: bool) -> Handling:
        if begin is None and not cursor:
            return Claims(self._receiver, self._size, self._concurrency)
        if begin is None:
            raise UsageError("A cursor moves in the transaction of the effects: give transaction=, too.")
        if not cursor:
            return Atomic(self._receiver, begin, self._concurrency)
        broker: Any = self._broker
        if not hasattr(broker, "cursors"):
            raise UsageError(
                "cursor=True needs a source that numbers its messages: Kafka, or NATS JetStream."
            )
        broker.cursors = Cursors(self._receiver, begin, self._concurrency, broker)
        return broker.cursors  # type: ignore[no-any-return]

    # What people call

    def handler(self, function: H) -> H:
        """Decorate the function that handles messages; then ``run()`` needs none."""
        self._handler = function
        return function

    def run(self, handler: Callable[..., Any] | None = None) -> None:
        """Handle messages until ``stop``; what is under way then is finished first."""
        with self._alone():
            chosen = self._chosen(handler, awaits=False)
            _blocking.run(self._run(self._receiver.blocking, chosen))

    async def arun(self, handler: Callable[..., Any] | None = None) -> None:
        """The same on an event loop."""
        with self._alone():
            chosen = self._chosen(handler, awaits=True)
            await self._run(self._receiver.asyncio, chosen)

    def run_once(self, handler: Callable[..., Any] | None = None) -> int:
        """Handle what can be had now, one batch at most; how many messages that were."""
        with self._alone():
            chosen = self._chosen(handler, awaits=False)
            return _blocking.run(self._once(self._receiver.blocking, chosen))

    async def arun_once(self, handler: Callable[..., Any] | None = None) -> int:
        """The same on an event loop."""
        with self._alone():
            chosen = self._chosen(handler, awaits=True)
            return await self._once(self._receiver.asyncio, chosen)

    def stop(self) -> None:
        """Have ``run`` return after the batch that is under way. May be called in a signal handler, also before it.

        That is for good: to consume again, make another consumer.
        """
        self._stopping.set()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Raise if it runs already: the client, and what is under way, are one run's."""
        if not self._turn.acquire(blocking=False):
            raise UsageError(
                "This consumer runs already. Make one for each thread or task, or have it run more handlers side by "
                "side with concurrency=."
            )
        try:
            yield
        finally:
            self._turn.release()

    # The one body of both colours

    async def _run(self, colour: Colour, handler: Callable[..., Any]) -> None:
        pause = FIRST_PAUSE
        try:
            while not self._stopping.is_set():
                self._refusals.stage = "fetch"
                try:
                    await self._broker.open()
                    async with self._beating(colour):
                        while not self._stopping.is_set():
                            await self._round(colour, handler)
                            pause = FIRST_PAUSE
                except self._broker.away as error:
                    self._refusals.hear(error, refused=self._broker.refuses(error))
                    await self._rest(colour, pause)
                    pause = min(pause * 2, LONGEST_PAUSE)
        finally:
            with suppress(*self._broker.away):
                await self._broker.close()

    async def _once(self, colour: Colour, handler: Callable[..., Any]) -> int:
        await self._broker.open()
        try:
            async with self._beating(colour):
                return await self._round(colour, handler)
        finally:
            await self._broker.close()

    async def _round(self, colour: Colour, handler: Callable[..., Any]) -> int:
        self._refusals.stage = "fetch"
        deliveries = await self._broker.fetch(self._size)
        if deliveries or self._broker.is_let_in:
            self._refusals.passed()
        if not deliveries:
            return 0
        outcomes = await self._handled(colour, handler, deliveries)
        verdicts = list(map(self._judge.verdict, deliveries, outcomes))
        settled, kinds = list(zip(deliveries, verdicts, strict=True)), set(map(type, verdicts))
        if Nack in kinds:
            self._tell_of_failures(outcomes, settled)
        self._refusals.stage = "settle"
        await self._broker.settle(settled)
        self._refusals.passed()
        if DeadLetter in kinds:
            await self._handling.pass_over([each for each, verdict in settled if type(verdict) is DeadLetter])
        if Nack in kinds:
            await self._rest_or_end(colour, outcomes, verdicts)
        return len(deliveries)

    async def _handled(
        self, colour: Colour, handler: Callable[..., Any], deliveries: Sequence[Delivery]
    ) -> list[Outcome[Any] | DeadLetter]:
        """What became of each delivery, in order; the heartbeat looks after them meanwhile."""
        now = self._receiver._clock()
        admit = self._intake.admit
        admitted = [admit(delivery, now) for delivery in deliveries]
        operation = "" if self._receiver.consumer else self._broker.group
        messages = [message for message in admitted if type(message) is Message]
        work: list[Work] = [*self._receiver._slots(messages, handler, operation, "", None, self.policy)]
        if len(messages) < len(admitted):
            slots = iter(work)
            work = [each if isinstance(each, DeadLetter) else next(slots) for each in admitted]
        self._under_way = (work, deliveries)
        try:
            return await self._handling.run(colour, work, deliveries, handler)
        finally:
            self._under_way, self._held = ((), ()), set()

    def _tell_of_failures(
        self,
        outcomes: Sequence[Outcome[Any] | DeadLetter],
        settled: Sequence[tuple[Delivery, Verdict]],
    ) -> None:
        """Log why messages come again: nobody else will, since they are given back without a word."""
        away: BaseException | None = None
        for outcome, (delivery, verdict) in zip(outcomes, settled, strict=True):
            if not isinstance(verdict, Nack) or not isinstance(outcome, Outcome):
                continue
            if verdict.reason == "failed":
                told = (delivery.source, named(delivery), outcome.attempt, explained(outcome.error))
                log.warning(
                    "a handler failed, %s %s comes again (attempt %d): %s", *told, exc_info=outcome.error
                )
            elif verdict.reason == "store_error":
                away = outcome.error
        if away is not None:
            log.warning("the store did not answer, messages come again: %s", explained(away))

    async def _rest_or_end(
        self, colour: Colour, outcomes: Sequence[Outcome[Any] | DeadLetter], verdicts: Sequence[Verdict]
    ) -> None:
        """While the store is away, fetching on only moves messages back and forth. One that was closed is the end."""
        for outcome in outcomes:
            if isinstance(outcome, Outcome) and isinstance(outcome.error, StoreClosed):
                raise outcome.error
        delays = [each.delay for each in verdicts if isinstance(each, Nack) and each.reason == "store_error"]
        if delays:
            await self._rest(colour, min(*delays, STORE_PAUSE))

    async def _rest(self, colour: Colour, pause: float) -> None:
        while pause > 0 and not self._stopping.is_set():
            await colour.pause(min(pause, LOOK_SECONDS))
            pause -= LOOK_SECONDS

    # The heartbeat

    async def _extend(self) -> None:
        held = {attempt.key for attempt in list(self._receiver.flow.keeper.live.values())}
        under_way = [(_key(work), delivery) for work, delivery in zip(*self._under_way, strict=True)]
        self._held |= held & {key for key, _ in under_way}
        due = to_extend(under_way, self._held, held)
        try:
            if due:
                await self._broker.extend(due)
        except Exception as error:  # the next beat may do better, and a delivery that comes again is absorbed
            log.warning("a deadline could not be extended: %s: %s", type(error).__name__, error)

    @asynccontextmanager
    async def _beating(self, colour: Colour) -> AsyncIterator[None]:
        """Extend what is under way, from a thread beside a blocking caller or in a task."""
        if self._broker.deadline is None:
            yield
            return
        period = self._broker.deadline / EXTEND_SHARE
        end = self._start_task(period) if colour.awaits else self._start_thread(period)
        try:
            yield
        finally:
            await end()

    def _start_thread(self, period: float) -> Callable[[], Awaitable[None]]:
        over = threading.Event()

        def beat() -> None:
            while not over.wait(period):
                _blocking.run(self._extend())

        thread = threading.Thread(target=beat, name="effectonce-heartbeat", daemon=True)
        thread.start()

        async def end() -> None:
            over.set()
            thread.join()

        return end

    def _start_task(self, period: float) -> Callable[[], Awaitable[None]]:
        async def beat() -> None:
            while True:
                await asyncio.sleep(period)
                await self._extend()

        task = asyncio.ensure_future(beat())

        async def end() -> None:
            task.cancel()
            await asyncio.wait([task])

        return end

    def _chosen(self, handler: Callable[..., Any] | None, *, awaits: bool) -> Callable[..., Any]:
        chosen = self._handler if handler is None else handler
        if chosen is None or not callable(chosen):
            raise UsageError("There is no handler: give one to run(), or decorate it with @consumer.handler.")
        if self._broker.awaits != awaits:
            instead = "await consumer.arun(...)" if self._broker.awaits else "consumer.run(...)"
            raise ColourMismatch(f"This consumer's client needs the other form: {instead}.")
        if awaits:
            check_awaited(chosen, "arun")
        elif not is_plain(chosen):
            raise ColourMismatch(
                f"{chosen!r} is a coroutine function or a generator: calling it runs nothing here. Give a plain "
                "function, or use the client's asyncio form."
            )
        self._handling.check(chosen)
        return chosen


def _key(work: Work) -> str:
    return "" if isinstance(work, (DeadLetter, Outcome)) else work[0].key


async def done(answer: Any) -> Any:
    """A client's answer: blocking ones have it, others are awaited."""
    return await answer if inspect.isawaitable(answer) else answer


__all__ = ["Ack", "Broker", "Consumer", "Options", "done"]
