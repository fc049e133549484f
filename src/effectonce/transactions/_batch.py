"""Many messages in one transaction: claimed by one question, handled one after the other, recorded by one answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
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
from ._stores import GRANTED
from .base import Adapter, SavepointGone, answered_after


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
    return await in_pieces(slots, size, lambda piece: _Piece(flow, colour, piece, handler).run())


class _Piece:
    """One round of claims and completions."""

    def __init__(
        self, flow: AtomicFlow, colour: Colour, slots: Sequence[Slot], handler: Callable[..., Any]
    ) -> None:
        self.flow, self.colour, self.slots, self.handler = flow, colour, slots, handler
        self.ended: dict[int, tuple[Attempt, Completion, Any, BaseException | None]] = {}
        self.outcomes: dict[int, Outcome[Any]] = {}
        self.decided: dict[int, Decision | StoreError] = {}
        self._followed: set[int] = set()
        """Those right after which another handler may run."""
        self._mark: str | None = None
        """The savepoint that was made for the next handler when that of the last one was released."""

    async def run(self) -> list[Outcome[Any]]:
        """Claim, run, record. A repeat inside the batch has the outcome of its first."""
        first: dict[str, int] = {}
        for index, (call, _) in enumerate(self.slots):
            first.setdefault(call.key, index)
        self.decided = dict(zip(first.values(), await self._claims(list(first.values())), strict=True))
        decisions = list(self.decided.items())
        self._followed = {index for (index, _), (_, after) in pairwise(decisions) if _is_granted(after)}
        for index, decision in decisions:
            await self._one(index, decision)
        await self._record()
        for index, (call, args) in enumerate(self.slots):
            if index not in self.outcomes:
                same = self.slots[first[call.key]][0].fingerprint == call.fingerprint
                self.outcomes[index] = (
                    self.flow.join(call, self.outcomes[first[call.key]])
                    if same
                    else await self.flow.run(self.colour, call, self.handler, args, {})
                )
        return [self.outcomes[index] for index in range(len(self.slots))]

    async def _claims(self, indexes: list[int]) -> Sequence[Decision | StoreError]:
        if not indexes:
            return ()
        calls = [self.slots[index][0] for index in indexes]
        for call in calls:
            self.flow.check(self.colour, call)
        store = store_of(self.colour, calls[0])
        try:
            await store.make_sure()
            return await store.claim_many([call.claim for call in calls])
        except StoreError as error:
            return [error] * len(indexes)

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
        """Run a handler between a savepoint and its release. If that is gone, so is the transaction."""
        call, args = self.slots[index]
        adapter = store_of(self.colour, call).adapter
        name, self._mark = self._mark or await _marked(adapter), None
        try:
            value = await invoked(self.colour, attempt, self.handler, args, {})
            if index in self._followed:
                mark = adapter.new_name()
                await adapter.move_on(name, mark)
                self._mark = mark
            else:
                await adapter.release(name)
        except SavepointGone as gone:
            raise ended_meanwhile(call.key) from gone
        except BaseException as error:
            if not await self._undone(name, error):
                raise
            ending = marked(call, answers.failure_of(call, attempt, error))
            self.ended[index] = (attempt, ending, None, error)
            if not isinstance(error, Exception):
                await self._stop(error)
                raise
        else:
            ending = marked(call, answers.completion_of(call, attempt, value))
            self.ended[index] = (attempt, ending, value, None)

    async def _undone(self, name: str, error: BaseException) -> bool:
        """Undo what a handler did; False if that can't be."""
        adapter = cast("Any", self.colour.store).adapter
        try:
            await adapter.roll_back_to(name)
        except Exception as second:
            error.add_note(
                f"effectonce could not undo what came before: {second!r}. Roll the transaction back."
            )
            return False
        answered_after(error)
        return True

    async def _stop(self, error: BaseException) -> None:
        """Record what was done so far, and give the other claims back: the user may commit all the same."""
        try:
            await self._record()
            for index, decision in self.decided.items():
                if index in self.outcomes or not _is_granted(decision):
                    continue
                claim, record = self.slots[index][0].claim, cast("Record", cast("Decision", decision).record)
                await self.colour.store.release(claim.key, claim.owner, record.fence, claim.keep, began=False)
        except Exception as second:
            error.add_note(
                f"effectonce could not record what was done: {second!r}. Roll the transaction back."
            )

    async def _record(self) -> None:
        if not self.ended:
            return
        endings = [ending for _, ending, _, _ in self.ended.values()]
        answered = await self.colour.store.complete_many(endings)
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
