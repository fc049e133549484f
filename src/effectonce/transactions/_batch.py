"""Many messages in one transaction: claimed by one question, handled one after the other, recorded by one answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from .. import _answers as answers
from .._attempt import Attempt
from .._colours import Colour
from .._flow import Flow
from .._messages import Outcome
from .._records import Completion, Decision, Ending, Record, Verdict
from ..batch import MAX_SIZE, Slot, check_number, in_pieces
from ..errors import StoreError
from ._flow import AtomicFlow, ended_meanwhile, invoked, marked, store_of
from ._interrupted import give_back, give_up, to_its_end, undo
from ._stores import GRANTED, TransactionStore
from .base import Adapter, SavepointGone, answered_after, code_of


async def run_batch(
    flow: Flow,
    colour: Colour,
    slots: Sequence[Slot | Outcome[Any]],
    handler: Callable[..., Any],
    size: int,
    concurrency: int,
) -> list[Outcome[Any]]:
    """Process messages in pieces of ``size``; outcomes in order, and no handler's failure spoils another.

    A connection does one thing at a time, so ``concurrency`` changes nothing here. What is raised is about the
    transaction, which has to be rolled back.
    """
    assert isinstance(flow, AtomicFlow)
    check_number("size", size, MAX_SIZE)
    return await in_pieces(slots, size, lambda piece: Piece(flow, colour, piece, handler).run())


class Piece:
    """One round of claims and completions."""

    def __init__(
        self, flow: AtomicFlow, colour: Colour, slots: Sequence[Slot], handler: Callable[..., Any]
    ) -> None:
        self.flow, self.colour, self.slots, self.handler = flow, colour, slots, handler
        self.ended: dict[int, tuple[Attempt, Completion, Any, BaseException | None]] = {}
        self.outcomes: dict[int, Outcome[Any]] = {}
        self.decided: dict[int, Decision | StoreError] = {}
        self._last: int | None = None
        """The last one whose handler runs."""
        self._mark: str | None = None
        """The savepoint that a handler began at, or that was made for the next when that of the last was released."""
        self._since: tuple[int, Attempt] | None = None
        """Whose work came after it. It is recorded before its savepoint goes: both can be undone together."""
        self._is_over = False
        """Whether everything is recorded, or the transaction is gone: there is nothing to bring to an end."""

    async def run(self) -> list[Outcome[Any]]:
        """Claim, run, record. A repeat inside the batch has the outcome of its first."""
        first: dict[str, int] = {}
        for index, (call, _) in enumerate(self.slots):
            first.setdefault(call.key, index)
        try:
            await self._claim(list(first.values()))
            for index, decision in self.decided.items():
                await self._one(index, decision)
            await self._record()
        except BaseException as error:
            if self.decided and not self._is_over:
                await to_its_end(self.colour.awaits, self._stop(error))
            raise
        for index, (call, args) in enumerate(self.slots):
            if index not in self.outcomes:
                same = self.slots[first[call.key]][0].fingerprint == call.fingerprint
                self.outcomes[index] = (
                    self.flow.join(call, self.outcomes[first[call.key]])
                    if same
                    else await self.flow.run(self.colour, call, self.handler, args, {})
                )
        return [self.outcomes[index] for index in range(len(self.slots))]

    async def _claim(self, indexes: list[int]) -> None:
        decided = dict(zip(indexes, await self._claims(indexes), strict=True))
        granted = [index for index, decision in decided.items() if _is_granted(decision)]
        self._last = granted[-1] if granted else None
        self.decided = decided

    async def _claims(self, indexes: list[int]) -> Sequence[Decision | StoreError]:
        if not indexes:
            return ()
        calls = [self.slots[index][0] for index in indexes]
        for call in calls:
            self.flow.check(self.colour, call)
        store = store_of(self.colour, calls[0])
        claims = [call.claim for call in calls]
        try:
            await store.make_sure()
            return await store.claim_many(claims)
        except StoreError as error:
            return [error] * len(indexes)
        except BaseException as error:
            await to_its_end(self.colour.awaits, give_back(store, claims, (), error))
            raise

    async def _one(self, index: int, decision: Decision | StoreError) -> None:
        call, args = self.slots[index]
        flow = self.flow
        if isinstance(decision, StoreError):
            self.outcomes[index] = flow.store_error(call, decision)
        elif decision.verdict is Verdict.IN_DOUBT and call.policy.prober:
            self.outcomes[index] = await flow.run(self.colour, call, self.handler, args, {})
        else:
            admitted = flow.admit(call, decision, flow.monotonic())
            if isinstance(admitted, Attempt):
                await self._handle(index, admitted)
            else:
                self.outcomes[index] = admitted

    async def _handle(self, index: int, attempt: Attempt) -> None:
        """Run a handler after a savepoint. If that is gone, so is the transaction."""
        call, args = self.slots[index]
        adapter = self._adapter
        if self._mark is None:
            self._mark = await _marked(adapter)
        self._since = index, attempt
        try:
            value = await invoked(self.colour, attempt, self.handler, args, {})
            ending = marked(call, answers.completion_of(call, attempt, value))
            mark = None if index == self._last else adapter.new_name()
            if mark is not None:
                await adapter.move_on(self._mark, mark)
            self.ended[index] = (attempt, ending, value, None)
            if mark is not None:
                self._mark, self._since = mark, None
        except SavepointGone as gone:
            self._is_over = True
            raise ended_meanwhile(call.key) from gone
        except Exception as error:
            await self._undone(error)

    @property
    def _adapter(self) -> Adapter:
        return cast("TransactionStore", self.colour.store).adapter

    async def _undone(self, error: BaseException) -> None:
        """Undo what the last handler did, and note what its error means; raise that if it can't be undone."""
        assert self._mark is not None
        try:
            await undo(self._adapter, self._mark)
        except Exception as second:
            self._is_over = True
            # After an error of the engine a savepoint is gone with its transaction; else it may have been released.
            await give_up(self._adapter, error, second, is_batch=code_of(error) is None)
            raise error from None
        self._note(error)
        answered_after(error)

    def _note(self, error: BaseException) -> None:
        """What the last handler did is undone."""
        if self._since is not None:
            index, attempt = self._since
            call = self.slots[index][0]
            self.ended[index] = (attempt, marked(call, answers.failure_of(call, attempt, error)), None, error)
        self._mark = self._since = None

    async def _stop(self, error: BaseException) -> None:
        """Undo what is not complete, record what is, and give other claims back: the user may commit all the same."""
        try:
            if self._mark is not None:
                await undo(self._adapter, self._mark)
            self._note(error)
            await self._record()
            for index, decision in self.decided.items():
                if index in self.ended or not _is_granted(decision):
                    continue
                claim, record = self.slots[index][0].claim, cast("Record", cast("Decision", decision).record)
                await self.colour.store.release(claim.key, claim.owner, record.fence, claim.keep, began=False)
        except BaseException as second:
            await give_up(self._adapter, error, second, is_batch=True)

    async def _record(self) -> None:
        """Record all endings, then forget the mark. What a session flushes only then is the last handler's own."""
        if not self.ended:
            return
        while True:
            endings = [ending for _, ending, _, _ in self.ended.values()]
            answered = await self.colour.store.complete_many(endings)
            try:
                if self._mark is not None:
                    await self._adapter.release(self._mark)
                break
            except SavepointGone as gone:
                self._is_over = True
                raise ended_meanwhile(endings[-1].key) from gone
            except Exception as flushed:
                if self._since is None:
                    raise
                await self._undone(flushed)
        self._is_over = True
        for (index, (attempt, ending, value, error)), answer in zip(
            self.ended.items(), answered, strict=True
        ):
            call = self.slots[index][0]
            if answer is Ending.FENCED:
                raise ended_meanwhile(call.key)
            if error is None:
                self.outcomes[index] = self.flow.recorded(call, attempt, ending, value)
            else:
                self.outcomes[index] = self.flow.unfinished(attempt, ending, answer, error)


def _is_granted(decision: Decision | StoreError) -> bool:
    return isinstance(decision, Decision) and decision.verdict in GRANTED


async def _marked(adapter: Adapter) -> str:
    name = adapter.new_name()
    await adapter.savepoint(name)
    return name
