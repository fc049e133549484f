"""A transaction for each call: begun with its claim, committed with its result.

``receiver.on(connection, commit=True)``. Everything is as in a transaction of the user's, except that nobody else
decides what becomes of it: what is recorded is committed, and what is raised leaves nothing. So BEGIN may go with the
claim, and COMMIT with the result, where the driver can send several statements at once.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

from .. import _answers as answers
from .._answers import Call
from .._attempt import Attempt
from .._colours import Colour
from .._flow import Flow
from .._messages import Outcome
from .._records import Claim, Completion, Decision, Ending
from ..batch import MAX_SIZE, Slot, check_number, in_pieces
from ._batch import Piece
from ._flow import AtomicAttempt, AtomicFlow
from ._interrupted import in_step, to_its_end
from ._stores import TransactionStore
from .base import Adapter, SavepointGone, answered_after, code_of, is_lost

T = TypeVar("T")


class OwnFlow(AtomicFlow):
    """Claims a key, runs the handler and records how it ended, in a transaction that is over then."""

    def check(self, colour: Colour, call: Call) -> None:
        """Raise if a transaction is there already, or if the call would wait for itself."""
        _store(colour).adapter.check_idle()
        self.check_around(call)

    async def opened(self, colour: Colour, call: Call) -> Attempt | Outcome[Any]:
        """Begin and claim. Who may not run has a transaction that is over."""
        try:
            opened = await super().opened(colour, call)
            if not isinstance(opened, Attempt):
                await _store(colour).commit()
        except BaseException:
            await _leave(colour)
            raise
        return opened

    def new_mark(self, store: TransactionStore, call: Call) -> str | None:
        """Only where something is recorded of an attempt that failed. Else it is undone by undoing everything."""
        policy = call.policy
        if policy.remember or policy.in_doubt or policy.max_attempts is not None:
            return store.adapter.new_name()
        return None

    def claimed(
        self, store: TransactionStore, claim: Claim, name: str | None
    ) -> Coroutine[Any, Any, Decision]:
        """Begin with a claim."""
        return store.begin_with(claim, name)

    def ended(
        self, store: TransactionStore, attempt: AtomicAttempt, completion: Completion
    ) -> Coroutine[Any, Any, Ending]:
        """Commit with a result."""
        if store.adapter.is_idle():
            raise SavepointGone("the handler has ended the transaction")
        attempt.is_committing = True
        return store.commit_with(completion, attempt.savepoint)

    async def finish(
        self, colour: Colour, call: Call, attempt: Attempt, value: Any, trouble: BaseException | None = None
    ) -> Outcome[Any]:
        """Record a result and commit, then give it."""
        try:
            return await super().finish(colour, call, attempt, value, trouble)
        except BaseException:
            await _leave(colour)
            raise

    async def fail(self, colour: Colour, call: Call, attempt: Attempt, error: BaseException) -> Outcome[Any]:
        """Undo what the handler did, record what its error means and commit that. The error is told in any case."""
        return await _or_nothing(colour, super().fail(colour, call, attempt, error))

    async def _failed(
        self, colour: Colour, call: Call, attempt: Attempt, error: BaseException
    ) -> Outcome[Any]:
        atomic, store = cast("AtomicAttempt", attempt), _store(colour)
        if atomic.is_committing and not await _goes_on(store.adapter):
            return self._unknown(attempt, error)
        if atomic.savepoint is None:
            if await _left(store.adapter):
                answered_after(error)
            nothing = answers.failure_of(call, attempt, error)
            return self.unfinished(attempt, nothing, Ending.DONE, error)
        try:
            ending, answer = await self.undone(colour, call, attempt, error)
            await store.commit()
        except Exception as second:
            await _left(store.adapter)
            self._note(error, second)
            return self._abandoned(attempt, error)
        answered_after(error)
        return self.unfinished(attempt, ending, answer, error)

    @staticmethod
    def _note(error: BaseException, second: Exception) -> None:
        if code_of(second) is None or is_lost(second):
            error.add_note(
                f"effectonce can't know whether this was recorded: {second!r}. The effects are undone in any case."
            )
        else:
            error.add_note(f"effectonce could not record this: {second!r}. Nothing of it was committed.")

    def _unknown(self, attempt: Attempt, error: BaseException) -> Outcome[Any]:
        """The outcome of an attempt whose COMMIT was sent, and had no answer or the wrong one."""
        if code_of(error) is None or is_lost(error):  # else the engine itself has refused to commit
            error.add_note(
                "effectonce can't know whether this was committed. Ask again with the same key, over a connection that "
                "is in order: what was committed is replayed, and what was not is run."
            )
        return self._abandoned(attempt, error)

    def _abandoned(self, attempt: Attempt, error: BaseException) -> Outcome[Any]:
        """The outcome of an attempt of which nothing is recorded, as far as is known here."""
        self.events.note("abandoned", self.monotonic())
        outcome = answers.failed(attempt, "failed", error)
        self.close(attempt, outcome)
        return outcome


async def run_batch(
    flow: Flow,
    colour: Colour,
    slots: Sequence[Slot | Outcome[Any]],
    handler: Callable[..., Any],
    size: int,
    concurrency: int,
) -> list[Outcome[Any]]:
    """Process messages in pieces of ``size``, each of them a transaction. What is raised is about one of these."""
    assert isinstance(flow, OwnFlow)
    check_number("size", size, MAX_SIZE)
    inside = AtomicFlow(flow, flow.blocking, flow.asyncio)

    async def committed(piece: Sequence[Slot]) -> list[Outcome[Any]]:
        store = _store(colour)
        await store.begin()
        outcomes = await Piece(inside, colour, piece, handler).run()
        await store.commit()
        return outcomes

    async def alone(piece: Sequence[Slot]) -> list[Outcome[Any]]:
        for call, _ in piece:
            flow.check(colour, call)
        return await _or_nothing(colour, committed(piece))

    return await in_pieces(slots, size, alone)


def _store(colour: Colour) -> TransactionStore:
    store: Any = colour.store
    return store  # type: ignore[no-any-return]


async def _or_nothing(colour: Colour, work: Coroutine[Any, Any, T]) -> T:
    """What comes of some work; if that raises, nothing of the transaction is left."""
    try:
        return await work
    except BaseException:
        await _leave(colour)
        raise


async def _leave(colour: Colour) -> None:
    """Roll back what is there, to its end. Where nobody knows what that is, close the connection."""
    await to_its_end(colour.awaits, _left(_store(colour).adapter))


async def _left(adapter: Adapter) -> bool:
    """Whether the connection is as good as before."""
    try:
        await in_step(adapter)  # first: what is known of a connection that is not may be long past
        await (adapter.tidy() if adapter.is_idle() else adapter.roll_back())
    except Exception:
        with suppress(Exception):
            await adapter.hang_up()
        return False
    return True


async def _goes_on(adapter: Adapter) -> bool:
    """Whether a transaction is still there: the engine answers, and to what it is asked. Else the connection is closed,
    unless it is idle.
    """
    try:
        await in_step(adapter)
        if adapter.is_idle():
            return False
        await adapter.execute("SELECT 1")
    except Exception as error:
        if code_of(error) is not None and not is_lost(error):
            return True
        with suppress(Exception):
            await adapter.hang_up()
        return False
    return True
