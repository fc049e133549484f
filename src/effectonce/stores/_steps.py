"""Stores on servers: every verb is a conversation of small atomic steps, and the protocol decides between them.

A server knows six steps, each of them one command on one record: put a record in place if there is none, end one
that is held, renew one that is held, without or with a longer journal, swap one that is still as it was read, and read.
None of them knows the protocol. The usual verb is one step: a new key is added, a duplicate is found by the same
command, a held claim is ended. Only what is rare needs a second: taking over, reclaiming after a lost reply, giving
back a claim that has a journal, settling a doubt.

Conversations are generators: they yield a step and get its reply. So any number of them share each round trip, and
blocking and asyncio stores share every line.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar, cast

from .._protocol import decide_claim, decide_ending, decide_renewal
from .._records import Claim, Completion, Decision, Ending, Record, Renewal, Verdict
from ..errors import StoreError, StoreMismatch, StoreUnavailable
from .base import Store, all_answered

T = TypeVar("T")


class Add(NamedTuple):
    """Put a claim's PENDING record in place unless the key has one: ``Added``, or ``Found`` with what is there."""

    claim: Claim

    @property
    def key(self) -> str:
        """The record concerned."""
        return self.claim.key


class End(NamedTuple):
    """End a record if it is PENDING and held by this owner and fence: ``DONE``, or ``Found`` with what is there.

    One that has a journal and gets no answer has to keep it, and is ``Found``.
    """

    completion: Completion

    @property
    def key(self) -> str:
        """The record concerned."""
        return self.completion.key


class Hold(NamedTuple):
    """Renew a record if it is PENDING and held by this owner and fence: ``DONE``, or ``Found`` with what is there."""

    renewal: Renewal

    @property
    def key(self) -> str:
        """The record concerned."""
        return self.renewal.key


class Save(NamedTuple):
    """The same, and write its journal, if the one that is there is shorter."""

    renewal: Renewal

    @property
    def key(self) -> str:
        """The record concerned."""
        return self.renewal.key


class Swap(NamedTuple):
    """Write ``after`` if the record still is ``before``: whether it was. Its times are on the server's clock."""

    before: Record
    after: Record

    @property
    def key(self) -> str:
        """The record concerned."""
        return self.before.key


class Read(NamedTuple):
    """Read a record: ``Found``."""

    key: str


Step = Add | End | Hold | Save | Swap | Read


class Added(NamedTuple):
    """The record is in place, with a fence that no earlier record of its key had."""

    fence: int
    now: float
    """The server's clock."""


class Found(NamedTuple):
    """What is there (None: nothing), and the server's clock."""

    record: Record | None
    now: float


DONE = Ending.DONE
"""The reply to a step that did what it was sent for."""

HELD: Any = object()
"""What a server says to ``Add`` or ``Swap`` when somebody's transaction has the record, perhaps for a moment only."""
KEPT: Any = object()
"""The reply to them when that goes on: nobody knows yet what the record will be."""
HELD_SECONDS, FIRST_PAUSE = 0.25, 0.002
"""How long that is looked at, and after how long first."""
MOST_REFUSALS: Final = 10
ASK_AGAIN_SECONDS: Final = 0.25
BUSY: Final = Decision(Verdict.BUSY, None, ASK_AGAIN_SECONDS)
"""What a claim is told then."""

Conversation = Generator[Step, Any, T]
Send = Callable[[Sequence[Step]], Awaitable[Sequence[Any]]]
"""Has steps done, and gives their replies in the steps' order."""
Pause = Callable[[float], Awaitable[None]]
"""Lets so many seconds pass."""


def claiming(claim: Claim) -> Conversation[Decision]:
    """Ask for a key."""
    before, times = None, 0
    reply = yield Add(claim) if claim.may_create else Read(claim.key)
    while type(reply) is not Added:
        if reply is KEPT:
            return BUSY
        record, now = cast("Found", reply)
        if record is not None or not claim.may_create:
            decision = decide_claim(record, claim, now, 0)
            after = decision.record
            if record is None or after is None or after is record:
                return decision
            times = _refused(before, record, times)
            before = record
            swapped = yield Swap(record, after)
            if swapped:
                return BUSY if swapped is KEPT else decision
        reply = yield Add(claim) if claim.may_create else Read(claim.key)
    fence, now = reply
    return decide_claim(None, claim, now, fence - 1)


def ending(completion: Completion) -> Conversation[Ending]:
    """End a claim, or settle a doubt."""
    reply: object
    before, times = None, 0
    held = completion.owner and completion.began
    reply = yield End(completion) if held else Read(completion.key)
    while reply is not DONE:
        record, now = cast("Found", reply)
        answer, after = decide_ending(record, completion, now)
        if record is None or after is None or after is record:
            return answer
        times = _refused(before, record, times)
        before = record
        if (yield from _swapping(record, after)):
            return answer
        reply = yield Read(completion.key)
    return DONE


def renewing(renewal: Renewal) -> Conversation[bool]:
    """Extend a lease."""
    before, times = None, 0
    reply = yield Hold(renewal) if renewal.progress is None else Save(renewal)
    while reply is not DONE:
        record, now = cast("Found", reply)
        renewed = decide_renewal(record, renewal, now)
        if record is None or renewed is None:
            return False
        times = _refused(before, record, times)
        before = record
        if (yield from _swapping(record, renewed)):
            return True
        reply = yield Read(renewal.key)
    return True


def _swapping(before: Record, after: Record) -> Conversation[bool]:
    swapped = yield Swap(before, after)
    if swapped is KEPT:
        raise StoreUnavailable("A transaction that is still open has the record. Try again.", key=before.key)
    return cast("bool", swapped)


def _refused(before: Record | None, record: Record, times: int) -> int:
    """How often in a row a change was refused, though nobody had changed the record. That never ends by itself."""
    if record != before:
        return 0
    if times >= MOST_REFUSALS:
        raise StoreMismatch(
            "The server shows the record and does not change it, though nobody else did. Look for a trigger on its "
            "table, or for row level security.",
            key=record.key,
        )
    return times + 1


def by_look(step: Step, reply: Any, unchanged: Any) -> Any:
    """The reply to ``Add`` or ``Swap`` that was sent as a ``Read``, because a transaction was seen to have the record.

    A look needs no lock. As long as it shows what was there before that transaction, it tells nothing.
    """
    if type(reply) is not Found:
        return reply
    if type(step) is Swap:
        return unchanged if reply.record == step.before else False
    return unchanged if reply.record is None else reply


def unless_failed(replies: Sequence[Any], but: type[Exception] | tuple[()] = ()) -> list[Any]:
    """The replies to one caller, or the error that is its own; ``but`` errors of this kind are replies."""
    for reply in replies:
        if isinstance(reply, Exception) and not isinstance(reply, but):
            raise reply
    return list(replies)


class Kept:
    """Keys that an open transaction was seen to have. For a moment others look, and don't wait to see the same."""

    SECONDS: Final = 1.0
    MOST: Final = 4096

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._last = 0.0

    def add(self, key: str) -> None:
        """It was seen just now."""
        if len(self._until) >= self.MOST:
            self._until = {}
        self._last = self._until[key] = time.monotonic() + self.SECONDS

    def __bool__(self) -> bool:
        if self._until and time.monotonic() > self._last:
            self._until = {}
        return bool(self._until)

    def __contains__(self, key: str) -> bool:
        return time.monotonic() < self._until.get(key, 0.0)


class SteppingStore(Store):
    """The verbs of a store on a server. A subclass sends steps, each batch of them in one round trip.

    Where records may be in somebody's open transaction, claims never wait for its lock on a connection: others, who
    have nothing to do with it, would wait for the connection. Such a claim is told HELD, and its caller waits here.
    """

    async def send(self, steps: Sequence[Step]) -> list[Any]:
        """Have steps done, in any order but each atomically, and give their replies in the steps' order.

        A batch never names a key twice, unless callers who know nothing of each other are served together.
        """
        raise NotImplementedError

    async def send_each(self, steps: Sequence[Step]) -> list[Any]:
        """The same; where there are several requests, an error is the reply to those whose request failed."""
        return await self.send(steps)

    async def outlast(
        self, steps: Sequence[Step], replies: Sequence[Any], send: Send, pause: Pause, kept: Kept
    ) -> list[Any]:
        """The replies when nothing is HELD any more: it is looked at for a while, and then asked for once more."""
        replies, give_up, seconds = list(replies), time.monotonic() + HELD_SECONDS, FIRST_PAUSE
        held = [number for number, reply in enumerate(replies) if reply is HELD]
        while held and (left := give_up - time.monotonic()) > 0:
            await pause(min(seconds, left))
            seconds *= 2
            looks = await send([Read(steps[number].key) for number in held])
            for number, reply in zip(held, looks, strict=True):
                replies[number] = by_look(steps[number], reply, HELD)
            held = [number for number in held if replies[number] is HELD]
        last = await send([steps[number] for number in held]) if held else ()
        for number, reply in zip(held, last, strict=True):
            replies[number] = KEPT if reply is HELD else reply
            if reply is HELD:
                kept.add(steps[number].key)
        return replies

    async def claim(self, claim: Claim) -> Decision:
        """Decide one claim: new or known, it is one round trip."""
        return await self._converse(claiming(claim))

    async def renew(self, renewal: Renewal) -> bool:
        """Extend a lease."""
        return await self._converse(renewing(renewal))

    async def complete(self, completion: Completion) -> Ending:
        """End a claim in one round trip."""
        return await self._converse(ending(completion))

    async def get(self, key: str) -> Record | None:
        """Read a record."""
        (found,) = await self.send((Read(key),))
        return cast("Found", found).record

    async def claim_many(self, claims: Sequence[Claim]) -> list[Decision]:
        """Decide many claims in one round trip."""
        return all_answered(await self._converse_each(map(claiming, claims), self.send_each))

    async def renew_many(self, renewals: Sequence[Renewal]) -> list[bool]:
        """Renew many leases in one round trip."""
        return all_answered(await self._converse_each(map(renewing, renewals), self.send_each))

    async def complete_many(self, completions: Sequence[Completion]) -> list[Ending]:
        """End many claims in one round trip."""
        return all_answered(await self._converse_each(map(ending, completions), self.send_each))

    async def _converse(self, conversation: Conversation[T]) -> T:
        step = next(conversation)
        try:
            while True:
                (reply,) = await self.send((step,))
                step = conversation.send(reply)
        except StopIteration as done:
            return cast("T", done.value)

    async def _converse_each(
        self, conversations: Iterable[Conversation[T]], send: Send
    ) -> list[T | StoreError]:
        """Hold many conversations at once: all that go on share each round trip.

        What ``send`` gives as an error instead of a reply is the end of that conversation alone.
        """
        answers: dict[int, T | StoreError] = {}
        going = {number: (talk, next(talk)) for number, talk in enumerate(conversations)}
        while going:
            replies = await send([step for _, step in going.values()])
            for (number, (talk, _)), reply in zip(list(going.items()), replies, strict=True):
                if isinstance(reply, StoreError):
                    answers[number] = reply
                    del going[number]
                    continue
                try:
                    going[number] = (talk, talk.send(reply))
                except StopIteration as done:
                    answers[number] = done.value
                    del going[number]
        return [answers[number] for number in sorted(answers)]
