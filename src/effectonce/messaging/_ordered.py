"""A batch whose groups keep their order: claimed together, run one after the other, stopped at the first that fails.

Messages of one group are a Kafka partition's, or a FIFO queue's of one group id. All are claimed in one round trip.
Then each group is one job: its handlers run in order, and when one has no result, those after it are given back
unbegun, without an attempt being counted. Messages without a group are jobs of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from .._attempt import Attempt
from .._colours import Colour, insist
from .._flow import Flow
from .._messages import Outcome
from .._records import Completion, State
from ..batch import Slot, _Piece, run_batch
from ._delivery import DONE, DeadLetter, Delivery, Held
from ._options import check_handler

if TYPE_CHECKING:
    from .._receiver import Receiver

Slots = Sequence[Slot | Outcome[Any]]


class Claims:
    """Has batches handled with claims in the receiver's store."""

    def __init__(self, receiver: Receiver, size: int, concurrency: int) -> None:
        self._receiver, self._size, self._concurrency = receiver, size, concurrency

    def check(self, handler: Callable[..., Any]) -> None:
        """Raise unless a handler takes a message."""
        check_handler(handler)

    async def run(
        self,
        colour: Colour,
        work: Sequence[Slot | Outcome[Any] | DeadLetter],
        deliveries: Sequence[Delivery],
        handler: Callable[..., Any],
    ) -> list[Outcome[Any] | DeadLetter]:
        """Handle a batch; outcomes in order."""
        terms = (handler, self._size, self._concurrency)
        if DeadLetter not in map(type, work):  # nearly every batch
            groups = [delivery.group for delivery in deliveries]
            return [*await run_in_groups(self._receiver.flow, colour, cast("Slots", work), groups, *terms)]
        good = [pair for pair in zip(work, deliveries, strict=True) if not isinstance(pair[0], DeadLetter)]
        slots, groups = cast("Slots", [slot for slot, _ in good]), [delivery.group for _, delivery in good]
        outcomes = iter(await run_in_groups(self._receiver.flow, colour, slots, groups, *terms))
        return [each if isinstance(each, DeadLetter) else next(outcomes) for each in work]

    async def pass_over(self, letters: Sequence[Delivery]) -> None:
        """What was put aside has its record, or never had one."""


async def run_in_groups(
    flow: Flow,
    colour: Colour,
    slots: Slots,
    groups: Sequence[Hashable | None],
    handler: Callable[..., Any],
    size: int,
    concurrency: int,
) -> list[Outcome[Any]]:
    """Process messages in one piece; outcomes in order."""
    if groups.count(None) == len(groups):
        return await run_batch(flow, colour, slots, handler, size, concurrency)
    unnamed = count()
    named = [(next(unnamed),) if group is None else group for group in groups]
    good = [(slot, group) for slot, group in zip(slots, named, strict=True) if not isinstance(slot, Outcome)]
    pieces = _Grouped(flow, colour, [slot for slot, _ in good], handler, concurrency)
    pieces.groups = [group for _, group in good]
    rest = iter(await pieces.run())
    return [slot if isinstance(slot, Outcome) else next(rest) for slot in slots]


class _Grouped(_Piece):
    """A piece whose jobs are groups."""

    groups: list[Hashable]

    async def _run_and_record(self, opened: dict[int, Attempt | None]) -> None:
        members: dict[Hashable, list[int]] = {}
        for index, group in enumerate(self.groups):
            if index in opened or index in self.outcomes:
                members.setdefault(group, []).append(index)
        jobs = [partial(self._group, group, opened) for group in members.values()]
        _, interrupted = await self.colour.gather(jobs, self.concurrency)
        self.interrupted = interrupted or self.interrupted
        done = self.ran.keys() | self.outcomes.keys()
        await self._give_back({index: each for index, each in opened.items() if index not in done})
        await self._record()

    async def _group(self, indexes: list[int], opened: dict[int, Attempt | None]) -> None:
        """Run a group up to the first message that has no result."""
        for index in indexes:
            if index not in self.outcomes:
                if opened[index] is not None and (waits := self._job(index, opened)) is not None:
                    await waits
                if opened[index] is None:  # somebody else is at it, or its turn came after its lease
                    await self._by_itself(index)
            if not self._has_result(index):
                return

    def _has_result(self, index: int) -> bool:
        if (ran := self.ran.get(index)) is not None:
            return ran.error is None
        return index in self.outcomes and self.outcomes[index].status in DONE

    async def _give_back(self, held: dict[int, Attempt | None]) -> None:
        """Release what never began, in one round trip. Where that can't be done, leases end it."""
        releases: list[Completion] = []
        for index, attempt in held.items():
            self.outcomes[index] = Outcome(
                "failed", error=Held("An earlier message of its group comes first.")
            )
            if attempt is not None:
                _, owner, _, _, keep, *_ = attempt.claim
                releases.append(
                    Completion(attempt.key, owner, attempt.fence, State.ABSENT, None, keep, began=False)
                )
                self.flow.close(attempt, None)
        if releases:
            _, cancelled = await insist(self.colour, lambda: self.colour.store.complete_many(releases))
            self.interrupted = self.interrupted or cancelled
