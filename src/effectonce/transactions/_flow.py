"""The one flow, inside a user's transaction: nothing has to be renewed, and nothing counts before the user commits.

A handler runs after a savepoint, and its result is recorded before that is released. When it raises, or something
interrupts it or the recording, all of that is undone, the claim with what the policy says of the error is what remains,
and the user decides whether to commit that. When the savepoint is gone, the transaction that the handler began in is
gone too, and there is nothing to record.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import CoroutineType
from typing import Any, NoReturn, TypeVar, cast

from .. import _answers as answers
from .._answers import Call
from .._attempt import CURRENT, Attempt, surrounding
from .._blocking import Gathered, Job, not_awaited
from .._colours import Colour
from .._flow import Flow, Home
from .._messages import Outcome
from .._records import ATOMIC, Claim, Completion, Decision, Ending, Guarantee, Record, Verdict, make
from ..codec import Form
from ..errors import InProgress, StoreError, UsageError
from ..hooks import EventKind
from ._interrupted import give_back, give_up, to_its_end, undo
from ._stores import TransactionStore
from .base import SavepointGone, answered_after

T = TypeVar("T")


class AtomicAttempt(Attempt):
    """An attempt in a user's transaction. Nobody can take its claim over while the transaction lives."""

    guarantee: Guarantee = "atomic"  # pyright: ignore[reportIncompatibleMethodOverride]
    lost: bool = False  # pyright: ignore[reportIncompatibleMethodOverride]
    savepoint: str | None = None
    """Where its handler began."""
    is_settled = False
    """Whether its end is recorded, or what it did was undone, as far as that can be."""
    is_committing = False
    """Whether its transaction, which is its own, may have been committed."""

    def end(self, outcome: Any) -> None:
        """Let those who wait for this attempt go on, and let go of the one around it."""
        super().end(outcome)
        self.outer = None


class InTransaction:
    """The colour of callers whose store is their own connection: everything happens in the order it is asked for."""

    cancelled: tuple[type[BaseException], ...] = ()
    trouble: tuple[type[BaseException], ...] = (StoreError,)

    def __init__(self, store: TransactionStore) -> None:
        self.awaits = store.adapter.awaits
        self.store = store

    async def pause(self, seconds: float) -> None:
        """Nobody waits in a transaction."""

    async def wait(self, attempt: Attempt, seconds: float) -> None:
        """Nobody waits in a transaction."""

    async def attend(self, attempt: Attempt, handler: Awaitable[T]) -> T:
        """Await a handler."""
        if self.awaits:
            return await handler
        raise not_awaited(attempt, handler)

    async def apart(self, work: Awaitable[T]) -> T:
        """A connection is used by one at a time."""
        return await work

    async def gather(self, jobs: Sequence[Job[T]], limit: int) -> Gathered[T]:
        """One job after the other."""
        begun = (job() for job in jobs)
        return [None if waits is None else await waits for waits in begun], None


class AtomicFlow(Flow):
    """Claims a key, runs the handler and records how it ended, all over one connection."""

    def __init__(self, flow: Flow, blocking: Colour, asyncio: Colour) -> None:
        self.keeper, self.events, self.monotonic, self.cache = (
            flow.keeper, flow.events, flow.monotonic, flow.cache,
        )  # fmt: skip
        self.blocking, self.asyncio = blocking, asyncio

    @property
    def home(self) -> Home:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        """Itself: ``receiver.on(…)`` and its flow would hold on to each other until somebody collects them."""
        return self

    def on(self, connection: Any) -> NoReturn:
        """Refused: a transaction is in one connection."""
        raise UsageError(
            "This is receiver.on(connection) already. Ask the receiver itself for another connection."
        )

    async def run(
        self,
        colour: Colour,
        call: Call,
        handler: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Outcome[Any]:
        """Run a handler for a call, or answer from what is remembered."""
        opened: Attempt | Outcome[Any] | None = None
        try:
            opened = await self.open(colour, call)
            if not isinstance(opened, Attempt):
                return opened
            value = await invoked(colour, opened, handler, args, kwargs)
            return await self.finish(colour, call, opened, value)
        except BaseException as error:
            if not isinstance(opened, AtomicAttempt) or opened.is_settled:
                raise
            return await self.fail(colour, call, opened, error)

    async def open(
        self,
        colour: Colour,
        call: Call,
        answer: Decision | BaseException | None = None,
        started: float = 0.0,
    ) -> Attempt | Outcome[Any]:
        """Claim the key: an attempt that may run, or the outcome of not running."""
        self.check(colour, call)
        return await self.opened(colour, call)

    async def opened(self, colour: Colour, call: Call) -> Attempt | Outcome[Any]:
        """The same, where nothing speaks against it."""
        cached = self.cache.get(call.key) if call.policy.local_cache else None
        if cached is not None and cached.fingerprint == call.fingerprint:
            return self.replay(call, cached)
        store = store_of(colour, call)
        name = self.new_mark(store, call)
        probed = False
        while True:
            started = self.monotonic()
            try:
                if store.look is not None:
                    await store.make_sure()
                decision = await self.claimed(store, call.claim, name)
            except StoreError as error:
                return self.store_error(call, error)
            except BaseException as error:
                if name is not None:
                    await to_its_end(colour.awaits, give_back(store, [call.claim], [name], error))
                raise
            doubted = decision.record if decision.verdict is Verdict.IN_DOUBT else None
            if doubted is not None and call.policy.prober and not probed:
                probed = True  # and asked again in any case: others may have settled it meanwhile
                await self.probe(colour, call, doubted)
                continue
            admitted = self.admit(call, decision, started)
            if isinstance(admitted, AtomicAttempt):
                admitted.savepoint = name
            return admitted

    def check(self, colour: Colour, call: Call) -> None:
        """Raise if there is no transaction, or if the call would wait for itself."""
        cast("TransactionStore", colour.store).adapter.check()
        self.check_around(call)

    def check_around(self, call: Call) -> None:
        """Raise if the call would wait for itself."""
        if CURRENT.get(None) is not None and any(
            each.key == call.key and each.flow.keeper is self.keeper for each in surrounding()
        ):
            raise answers.waits_for_itself(call)

    def new_mark(self, store: TransactionStore, call: Call) -> str | None:
        """A name for where the handler begins; None: it needs no mark, since nothing is left of what it is part of."""
        return store.adapter.new_name()

    def claimed(
        self, store: TransactionStore, claim: Claim, name: str | None
    ) -> Coroutine[Any, Any, Decision]:
        """Have a claim decided, and a mark made where its handler may begin."""
        return store.open(claim, name)

    def ended(
        self, store: TransactionStore, attempt: AtomicAttempt, completion: Completion
    ) -> Coroutine[Any, Any, Ending]:
        """Have a claim ended, and the mark forgotten."""
        return store.close_with(completion, attempt.savepoint)

    def begin(self, call: Call, verdict: Verdict, record: Record, started: float) -> Attempt:
        """A claim was granted. Its lease is the transaction."""
        attempt = AtomicAttempt(call.claim, record.fence, record.attempts, started, self.monotonic)
        attempt.flow, attempt.policy, attempt.progress = self, call.policy, record.result
        attempt.outer = CURRENT.get(None)
        kind: EventKind = "taken_over" if verdict is Verdict.TAKEN_OVER else "claimed"
        self.events.note(kind, started)
        if self.events.hooks:
            self.events.tell(kind, attempt.key, attempt.fence, attempt.number, "atomic")
        return attempt

    async def finish(
        self, colour: Colour, call: Call, attempt: Attempt, value: Any, trouble: BaseException | None = None
    ) -> Outcome[Any]:
        """Record a result in the transaction, then give it."""
        atomic: Any = attempt
        atomic.ending = True
        store: Any = colour.store
        try:
            completion = marked(call, answers.completion_of(call, attempt, value))
            ending = await self.ended(store, atomic, completion)
            atomic.is_settled = True
        except SavepointGone as gone:
            atomic.is_settled = True
            raise ended_meanwhile(call.key) from gone
        except BaseException as error:  # an interruption, or what a session flushed only now
            return await self.fail(colour, call, attempt, error)
        if ending is Ending.FENCED:
            raise ended_meanwhile(call.key)
        return self.recorded(call, attempt, completion, value)

    def recorded(self, call: Call, attempt: Attempt, completion: Completion, value: Any) -> Outcome[Any]:
        """The outcome of an attempt whose result has been recorded. It is not cached: nobody has committed it."""
        now = self.monotonic()
        took = now - attempt.started
        self.events.note("completed", now, took)
        if self.events.hooks:
            self.events.tell("completed", attempt.key, attempt.fence, attempt.number, "atomic", took)
        outcome = make(Outcome, ("executed", value, False, attempt.number, attempt.fence, "atomic", None))
        self.close(attempt, outcome)
        return outcome

    def hold(self, attempt: Attempt, ending: Completion) -> None:
        """Nor is a remembered error."""

    def replay(self, call: Call, record: Record, seconds_left: float = 0.0) -> Outcome[Any]:
        """Answer a duplicate. It is not cached either: the record may be this transaction's own, and undone with it."""
        return super().replay(call, record)

    async def fail(self, colour: Colour, call: Call, attempt: Attempt, error: BaseException) -> Outcome[Any]:
        """Undo what the handler did and record what its error means. Whatever goes wrong here, the error is told."""
        cast("AtomicAttempt", attempt).is_settled = True
        outcome = await to_its_end(colour.awaits, self._failed(colour, call, attempt, error))
        if isinstance(error, Exception):
            return outcome
        raise error

    async def _failed(
        self, colour: Colour, call: Call, attempt: Attempt, error: BaseException
    ) -> Outcome[Any]:
        try:
            ending, answer = await self.undone(colour, call, attempt, error)
            outcome = self.unfinished(attempt, ending, answer, error)
            answered_after(error)
        except BaseException as second:
            await give_up(cast("TransactionStore", colour.store).adapter, error, second)
            if not isinstance(error, Exception):
                self.events.note("abandoned", self.monotonic())
            return answers.failed(attempt, "failed", error)
        return outcome

    async def undone(
        self, colour: Colour, call: Call, attempt: Attempt, error: BaseException
    ) -> tuple[Completion, Ending]:
        """Undo what the handler did and record what its error means; raise if that can't be done.

        Cancelled and interrupted ones too: nothing of what they did is left, and the user may commit that.
        """
        store, name = cast("TransactionStore", colour.store), cast("AtomicAttempt", attempt).savepoint
        if name is not None:
            await undo(store.adapter, name)
        ending = marked(call, answers.failure_of(call, attempt, error))
        return ending, await store.complete(ending)

    def refuse(self, call: Call, decision: Decision) -> Outcome[Any]:
        """The outcome of a claim that was neither granted nor done before. Nobody waits for it in a transaction."""
        outcome = super().refuse(call, decision)._replace(guarantee="atomic")
        if isinstance(outcome.error, InProgress):
            busy = InProgress(
                "Another attempt holds this key, and nobody waits for it inside a transaction. Roll back, then run the "
                f"transaction again; the key is free in {decision.retry_after:.1f} s unless its holder goes on.",
                key=call.key,
                retry_after=decision.retry_after,
            )
            return outcome._replace(error=busy)
        return outcome

    def store_error(self, call: Call, error: StoreError) -> Outcome[Any]:
        """The outcome of a command that could not be understood: a table that is not there, or not ours."""
        return super().store_error(call, error)._replace(guarantee="atomic")


async def invoked(
    colour: Colour,
    attempt: Attempt,
    handler: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What a handler returns, of either colour."""
    token = CURRENT.set(attempt)
    try:
        value = handler(*args, **kwargs)
        if type(value) is CoroutineType or (colour.awaits and inspect.isawaitable(value)):
            value = await colour.attend(attempt, value)
        return value
    finally:
        CURRENT.reset(token)


def store_of(colour: Colour, call: Call) -> TransactionStore:
    """The store that waits for other transactions, or one that does not, as the policy says."""
    store: Any = colour.store
    return store.hurried() if call.policy.busy in ("reject", "skip") else store  # type: ignore[no-any-return]


def marked(call: Call, completion: Completion) -> Completion:
    """A completion whose result says that it was recorded with its effects; also to those who only replay it."""
    result = completion.result
    if not result or type(call.hint) is Form or result.startswith(answers.UNAVAILABLE):
        return completion
    key, owner, fence, state, _, keep, began = completion
    return make(Completion, (key, owner, fence, state, ATOMIC + result, keep, began))


def ended_meanwhile(key: str) -> UsageError:
    """What to say when the transaction that a handler began in is not there any more at its end."""
    return UsageError(
        "The handler has returned, but the transaction that it ran in was ended meanwhile, so its result is not "
        "recorded with its effects. A handler must not commit or roll back, nor execute what does so by itself (DDL on "
        "MySQL), nor go on after a deadlock. Roll back now, and run the transaction again.",
        key=key,
    )
