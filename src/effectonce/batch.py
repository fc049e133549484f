"""Many messages at once: one round trip to claim them, handlers side by side, one round trip to record them."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from threading import get_ident
from types import CoroutineType
from typing import Any, NamedTuple, cast

from . import _answers as answers
from ._answers import Call
from ._attempt import CURRENT, Attempt, Unprotected
from ._blocking import Job
from ._colours import Colour, insist
from ._flow import CLAIMED, DONE, Flow
from ._messages import Outcome
from ._records import Claim, Completion, Decision, Ending, State, Verdict, make
from .errors import LeaseLost, StoreError, StoreUnavailable, UsageError
from .stores.base import PartlyAnswered

MAX_SIZE = 1000
DEFAULT_SIZE = 100
DEFAULT_CONCURRENCY = 16

Slot = tuple[Call, tuple[Any, ...]]
"""One message of a batch: its call and the handler's arguments."""


def check_number(word: str, number: Any, most: int | None = None) -> None:
    """Raise unless it is one to count by."""
    if type(number) is not int or number < 1 or (most is not None and number > most):
        limit = "1 or more" if most is None else f"1 to {most}"
        raise UsageError(f"{word}={number!r} must be a whole number, {limit}.")


class _Ran(NamedTuple):
    """A handler that was run: its attempt and what it returned or raised."""

    attempt: Attempt
    value: Any
    error: BaseException | None


async def run_batch(
    flow: Flow,
    colour: Colour,
    slots: Sequence[Slot | Outcome[Any]],
    handler: Callable[..., Any],
    size: int,
    concurrency: int,
) -> list[Outcome[Any]]:
    """Process messages in pieces of ``size``; outcomes in order, and no failure spoils another."""
    check_number("size", size, MAX_SIZE)
    check_number("concurrency", concurrency)
    return await in_pieces(slots, size, lambda piece: _Piece(flow, colour, piece, handler, concurrency).run())


async def in_pieces(
    slots: Sequence[Slot | Outcome[Any]],
    size: int,
    process: Callable[[list[Slot]], Awaitable[list[Outcome[Any]]]],
) -> list[Outcome[Any]]:
    """Process so many at a time; outcomes in order, among them those of slots that have theirs already."""
    if 0 < len(slots) <= size and Outcome not in map(type, slots):  # nearly every batch
        return await process(cast("list[Slot]", slots))
    good: list[Slot] = [slot for slot in slots if not isinstance(slot, Outcome)]
    outcomes: list[Outcome[Any]] = []
    for start in range(0, len(good), size):
        outcomes += await process(good[start : start + size])
    rest = iter(outcomes)
    return [slot if isinstance(slot, Outcome) else next(rest) for slot in slots]


class _Piece:
    """One round of claims and completions."""

    def __init__(
        self, flow: Flow, colour: Colour, slots: Sequence[Slot], handler: Callable[..., Any], concurrency: int
    ) -> None:
        self.flow, self.colour, self.slots = flow, colour, slots
        self.handler, self.concurrency = handler, concurrency
        self.thread = get_ident()
        self.is_awaited = colour.awaits and inspect.iscoroutinefunction(handler)
        self.outcomes: dict[int, Outcome[Any]] = {}
        self.begun: set[int] = set()
        self.ran: dict[int, _Ran] = {}
        self.interrupted: BaseException | None = None  # heard at the end, when all that ran is recorded

    async def run(self) -> list[Outcome[Any]]:
        """Claim, run, record. A repeat inside the batch has the outcome of its first."""
        if len({call.claim.key for call, _ in self.slots}) == len(self.slots):  # nearly every batch
            await self._run(range(len(self.slots)))
            return [self.outcomes[index] for index in range(len(self.slots))]
        first: dict[tuple[str, bytes], int] = {}
        for index, (call, _) in enumerate(self.slots):
            before = first.setdefault((call.key, call.fingerprint), index)
            if call.claim.may_create and not self.slots[before][0].claim.may_create:
                first[call.key, call.fingerprint] = (
                    index  # one that is late must not keep the other from running
                )
        by_key: dict[str, int] = {}
        for (key, _), index in first.items():
            by_key.setdefault(key, index)
        # The same key with another payload: what the store says of that alone.
        await self._run(list(by_key.values()), alone=set(first.values()).difference(by_key.values()))
        return [
            self._outcome(index, first[call.key, call.fingerprint])
            for index, (call, _) in enumerate(self.slots)
        ]

    async def _run(self, indexes: Sequence[int], alone: Iterable[int] = ()) -> None:
        opened: dict[int, Attempt | None] | None = None
        try:
            opened = await self._claim(indexes)
            opened.update(dict.fromkeys(alone))
            if opened:
                await self._run_and_record(opened)
        except BaseException as error:
            self.interrupted = error
            for index, (call, _) in enumerate(self.slots):
                self.flow.keeper.abandon(call.claim)
                if opened is None or (opened.get(index) is not None and index not in self.begun):
                    self.flow.interrupted(self.colour, call.claim, error)
            raise
        if self.interrupted is not None:
            raise self.interrupted

    async def _claim(self, indexes: Sequence[int]) -> dict[int, Attempt | None]:
        """Attempts to run, by place in the batch; None where a single claim has to wait or to probe."""
        flow, claims = self.flow, [self.slots[index][0].claim for index in indexes]
        sent_at = flow.monotonic()
        try:
            decisions = await self._send(claims)
        except StoreError:  # one key's trouble, perhaps, and no other's: each is asked for alone
            return dict.fromkeys(indexes)
        opened: dict[int, Attempt | None] = {}
        for index, decision in zip(indexes, decisions, strict=True):
            call = self.slots[index][0]
            admitted: Attempt | Outcome[Any]
            try:
                if type(decision) is Decision and decision.verdict is CLAIMED and decision.record is not None:
                    admitted = flow.begin(call, CLAIMED, decision.record, sent_at)  # as nearly every message
                elif isinstance(decision, StoreError):
                    admitted = flow.fall_back(call, decision, sent_at)
                elif _has_to_wait(call, decision):
                    opened[index] = None
                    continue
                else:
                    admitted = flow.admit(call, decision, sent_at)
            except Exception as error:  # what can't be told of one must not cost the others their turn
                admitted = Outcome("failed", error=error)
            if isinstance(admitted, Attempt):
                opened[index] = admitted
            else:
                self.outcomes[index] = admitted
        party = object()  # none of them is recorded before all of them have run
        for attempt in opened.values():
            if attempt is not None:
                attempt.party = party
        return opened

    async def _send(self, claims: list[Claim]) -> Sequence[Decision | StoreError]:
        try:
            try:
                return await self.colour.store.claim_many(claims)
            except StoreUnavailable as error:  # perhaps only the reply was lost
                return await self._ask_again(claims, error)
        except self.colour.cancelled:
            for claim in claims:
                await self.flow.withdraw(self.colour, claim)
            raise

    async def _ask_again(
        self, claims: list[Claim], error: StoreUnavailable
    ) -> Sequence[Decision | StoreError]:
        """Ask a second time for what was not answered. What was granted is ours, whatever becomes of the others."""
        decisions = _answered(error, len(claims))
        left = [number for number, decision in enumerate(decisions) if decision is None]
        second: Sequence[Decision | StoreError]
        try:
            second = await self.colour.store.claim_many([claims[number] for number in left])
        except StoreUnavailable as again:
            again.sent = again.sent or error.sent
            second = [decision or again for decision in _answered(again, len(left))]
        rest = iter(second)
        return [next(rest) if decision is None else decision for decision in decisions]

    async def _run_and_record(self, opened: dict[int, Attempt | None]) -> None:
        """Whom to wait for is asked when all that was claimed is recorded.

        Else two batches that hold a key of each other's would wait in vain, and what is done would be lost with the
        process meanwhile.
        """
        await self._gather([partial(self._job, index, opened) for index, held in opened.items() if held])
        for index, attempt in opened.items():
            if attempt is not None and index not in self.ran:
                self.flow.close(attempt, None)  # its handler never began
                await self.flow.withdraw(self.colour, attempt.claim)
        await self._record()
        if self.interrupted is None:
            alone = [index for index, held in opened.items() if not held]
            await self._gather([partial(self._by_itself, index) for index in alone])

    async def _gather(self, jobs: Sequence[Job[None]]) -> None:
        if jobs:
            _, interrupted = await self.colour.gather(jobs, self.concurrency)
            self.interrupted = interrupted or self.interrupted

    def _job(self, index: int, opened: dict[int, Attempt | None]) -> Coroutine[Any, Any, None] | None:
        """Run a handler and write down what became of it, or give what has to be awaited for that."""
        attempt = opened[index]
        assert attempt is not None
        self.begun.add(index)  # first: who was interrupted looks at it last
        if self.interrupted is not None:
            return None
        if attempt.lost:  # its turn comes after its lease: it goes its own way
            self.flow.close(attempt, None)
            opened[index] = None
            return None
        if self.is_awaited:
            return self._attended(index, attempt)
        token = CURRENT.set(attempt)
        attempt.line = get_ident()
        try:
            value = self.handler(*self.slots[index][1])
            if type(value) is CoroutineType or (self.colour.awaits and inspect.isawaitable(value)):
                return self._attended(index, attempt, value)
            self.ran[index] = make(_Ran, (attempt, value, None))
        except BaseException as error:
            self._raised(index, attempt, error)
        finally:
            CURRENT.reset(token)
            if attempt.line != self.thread:  # it helps out, and may next have to wait for this key elsewhere
                attempt.line = None
        return None

    async def _attended(self, index: int, attempt: Attempt, begun: Awaitable[Any] | None = None) -> None:
        """The same where there is something to await."""
        token = CURRENT.set(attempt)
        try:
            waits: Awaitable[Any] = self.handler(*self.slots[index][1]) if begun is None else begun
            value = await self.colour.attend(attempt, waits)
            self.ran[index] = make(_Ran, (attempt, value, None))
        except BaseException as error:
            self._raised(index, attempt, error)
        finally:
            CURRENT.reset(token)

    def _raised(self, index: int, attempt: Attempt, error: BaseException) -> None:
        """Note what a handler raised. After Ctrl-C what has begun is brought to its end, the rest never begins."""
        self.ran[index] = _Ran(attempt, None, error)
        if not isinstance(error, (Exception, *self.colour.cancelled)):
            self.interrupted = self.interrupted or error

    async def _by_itself(self, index: int) -> None:
        """Have a message go its own way: it was not claimed with the others, or its turn came after its lease."""
        if self.interrupted is not None:
            return
        call, args = self.slots[index]
        outcome = await self._alone(self.flow.run(self.colour, call, self.handler, args, {}), own=True)
        if outcome is not None:
            self.outcomes[index] = outcome

    async def _alone(self, flow: Coroutine[Any, Any, Outcome[Any]], *, own: bool) -> Outcome[Any] | None:
        """The outcome of one message that goes its own way; what interrupts it interrupts the batch, later.

        Not so a cancellation that may be the handler's ``own``: if the batch is cancelled it hears so by itself.
        """
        try:
            return await flow
        except Exception as error:
            return Outcome("failed", error=error)
        except BaseException as error:
            if own and isinstance(error, self.colour.cancelled):
                return Outcome("failed", error=error)
            self.interrupted = self.interrupted or error
            return None

    async def _record(self) -> None:
        ran, endings = self.ran, dict[int, Completion]()
        for index, (attempt, value, error) in ran.items():
            call = self.slots[index][0]
            attempt.ending = True
            if isinstance(attempt, Unprotected):
                await self._record_alone(index, ran[index])
            elif error is None:
                endings[index] = answers.completion_of(call, attempt, value)
            elif isinstance(error, Exception) and not (isinstance(error, LeaseLost) and attempt.lost):
                endings[index] = answers.failure_of(call, attempt, error)
            else:
                await self._record_alone(index, ran[index])
        if not endings:
            return
        store, sent = self.colour.store, list(endings.values())
        answered, cancelled = await insist(self.colour, lambda: store.complete_many(sent))
        self.interrupted = self.interrupted or cancelled
        each: Sequence[Ending | StoreError]
        if isinstance(answered, StoreUnavailable):
            each = [answered if answer is None else answer for answer in _answered(answered, len(sent))]
        elif isinstance(answered, Exception):  # what one of them met must not cost the others their answers
            for index in endings:
                await self._record_alone(index, ran[index])
            return
        else:
            each = answered
        for (index, ending), answer in zip(endings.items(), each, strict=True):
            call, (attempt, value, error) = self.slots[index][0], ran[index]
            if answer is DONE and error is None:  # the way of nearly every message
                self.outcomes[index] = self.flow.recorded(call, attempt, ending, value)
            else:
                self.outcomes[index] = await self._ended(call, ran[index], ending, answer)

    async def _ended(
        self, call: Call, ran: _Ran, ending: Completion, answer: Ending | StoreError
    ) -> Outcome[Any]:
        if isinstance(answer, StoreError):
            self.flow.left_to_keeper(ran.attempt, ending, answer)
            return self.flow.store_error(call, answer)
        if answer is Ending.FENCED and ending.state is not State.ABSENT:
            return await self.flow.overtaken(self.colour, call, ran.attempt)
        if ran.error is not None:
            return self.flow.unfinished(ran.attempt, ending, answer, ran.error)
        return self.flow.recorded(call, ran.attempt, ending, ran.value)

    async def _record_alone(self, index: int, ran: _Ran) -> None:
        call, flow = self.slots[index][0], self.flow
        if ran.error is None:
            ending = flow.finish(self.colour, call, ran.attempt, ran.value)
        else:
            ending = flow.fail(self.colour, call, ran.attempt, ran.error)
        own = self.interrupted is None and isinstance(ran.error, self.colour.cancelled)
        outcome = await self._alone(ending, own=own)
        if outcome is not None:
            self.outcomes[index] = outcome

    def _outcome(self, index: int, first: int) -> Outcome[Any]:
        outcome = self.outcomes[first]
        return outcome if index == first else self.flow.join(self.slots[index][0], outcome)


def _answered(error: StoreUnavailable, count: int) -> Sequence[Any]:
    """What many commands were told that met this."""
    return error.answers if isinstance(error, PartlyAnswered) else [None] * count


def _has_to_wait(call: Call, decision: Decision) -> bool:
    waits = decision.verdict is Verdict.BUSY and call.policy.busy in ("wait", "join")
    return waits or (decision.verdict is Verdict.IN_DOUBT and call.policy.prober is not None)
