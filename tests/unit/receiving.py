"""What the tests of the receiver share: two colours, and a store that can be watched, failed and held up."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import pytest
from tests.integration.sqlite_helpers import Caller

from effectonce import Message, Outcome, Receiver
from effectonce._records import Claim, Completion, Decision, Ending, Record, Renewal
from effectonce.errors import StoreMismatch, UsageError
from effectonce.hooks import Event
from effectonce.stores.memory import MemoryStore

LONG = 60.0


class Blocking:
    """Callers without an event loop."""

    name = "blocking"

    def process(self, receiver: Receiver, message: Message, handler: Any, **choices: Any) -> Outcome[Any]:
        return receiver.process(message, handler, **choices)

    def batch(self, receiver: Receiver, messages: Any, handler: Any, **choices: Any) -> list[Outcome[Any]]:
        return receiver.process_batch(messages, handler, **choices)

    def idempotent(self, receiver: Receiver, function: Callable[..., Any], **choices: Any) -> Any:
        return receiver.idempotent(**choices)(function)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def resolve(self, receiver: Receiver, *args: Any, **choices: Any) -> bool:
        return receiver.resolve(*args, **choices)

    def sweep(self, receiver: Receiver, *args: Any, **choices: Any) -> Any:
        return receiver.sweep(*args, **choices)


class Asyncio:
    """Callers on an event loop; what they hand over are coroutine functions."""

    name = "asyncio"

    def process(self, receiver: Receiver, message: Message, handler: Any, **choices: Any) -> Outcome[Any]:
        return asyncio.run(receiver.aprocess(message, coroutine_function(handler), **choices))

    def batch(self, receiver: Receiver, messages: Any, handler: Any, **choices: Any) -> list[Outcome[Any]]:
        return asyncio.run(receiver.aprocess_batch(messages, coroutine_function(handler), **choices))

    def idempotent(self, receiver: Receiver, function: Callable[..., Any], **choices: Any) -> Any:
        return receiver.idempotent(**choices)(coroutine_function(function))

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        async def called() -> Any:
            return await function(*args, **kwargs)

        return asyncio.run(called())

    def resolve(self, receiver: Receiver, *args: Any, **choices: Any) -> bool:
        return asyncio.run(receiver.aresolve(*args, **choices))

    def sweep(self, receiver: Receiver, *args: Any, **choices: Any) -> Any:
        return asyncio.run(receiver.asweep(*args, **choices))


Colour = Blocking | Asyncio
COLOURS: tuple[Colour, ...] = (Blocking(), Asyncio())


def coroutine_function(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """The same function in the other colour."""

    @functools.wraps(function)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return coroutine


# Handlers


class Counted:
    """A handler that counts its runs and returns what it was made with, or raises it."""

    def __init__(self, result: Any = "done") -> None:
        self.result = result
        self.runs = 0

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.runs += 1
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def must_not_run(*_: Any, **__: Any) -> Any:
    """A handler for keys that are not to run."""
    raise AssertionError("the handler ran")


class ClosedMeanwhile(dict[bytes, Any]):
    """The live attempts of a receiver that somebody begins to close just before an attempt becomes one of them."""

    def __init__(self, receiver: Receiver) -> None:
        super().__init__()
        self._receiver = receiver

    def __setitem__(self, owner: bytes, attempt: Any) -> None:
        self._receiver._turn_away()
        super().__setitem__(owner, attempt)


class Crash(BaseException):
    """Ends a handler as a dying process would: without its word."""


def crash(receiver: Receiver, message: Message, **choices: Any) -> None:
    """Leave an attempt behind that nobody renews any more."""
    with pytest.raises(Crash):
        receiver.process(message, Counted(Crash()), **choices)


@contextmanager
def running(
    receiver: Receiver, message: Message, result: Any = "first", **choices: Any
) -> Iterator[threading.Event]:
    """An attempt that stays in its handler until the block ends, or the event it gives is set."""
    entered, leave = threading.Event(), threading.Event()
    last_step = Counted(result)

    def handler(_: Message) -> Any:
        entered.set()
        assert leave.wait(20)
        return last_step()

    first = Caller(lambda: receiver.process(message, handler, **choices))
    assert entered.wait(20)
    try:
        yield leave
    finally:
        leave.set()
        first.join()


def by_hand(receiver: Receiver) -> Receiver:
    """A receiver whose keeper looks only when a test says so: its thread takes no part in a clock that jumps."""
    receiver._keeper.wake_at = -inf
    return receiver


class Told(list[Event]):
    """A hook that keeps what it is told."""

    def __call__(self, event: Event) -> None:
        self.append(event)

    def kinds(self) -> list[str]:
        return [event.kind for event in self]


# Stores


class SpoiltStore(MemoryStore):
    """A store where some keys hold what is not a record of ours: whatever names one of them is refused whole."""

    spoilt: frozenset[str] = frozenset()

    def check(self, commands: Sequence[Claim | Completion | Renewal]) -> None:
        if any(command.key in self.spoilt for command in commands):
            raise StoreMismatch("another program's")

    async def claim(self, claim: Claim) -> Decision:
        self.check([claim])
        return await super().claim(claim)

    async def complete(self, completion: Completion) -> Ending:
        self.check([completion])
        return await super().complete(completion)

    async def renew_many(self, renewals: Sequence[Renewal]) -> list[bool]:
        self.check(renewals)
        return await super().renew_many(renewals)

    async def claim_many(self, claims: Sequence[Claim]) -> list[Decision]:
        decisions = [await MemoryStore.claim(self, claim) for claim in claims if claim.key not in self.spoilt]
        self.check(claims)
        return decisions

    async def complete_many(self, completions: Sequence[Completion]) -> list[Ending]:
        self.check(completions)
        return await super().complete_many(completions)


class NarrowStore(MemoryStore):
    """A store that has no room for answers of more than four thousand bytes."""

    async def complete(self, completion: Completion) -> Ending:
        if completion.result is not None and len(completion.result) > 4000:
            raise UsageError("no room for it")
        return await super().complete(completion)


Disturbance = Callable[[], Any]


class StagedStore(MemoryStore):
    """A memory store that lists its round trips, and does what a test says before or after one.

    ``before["claim"]`` is called before each claim, ``after["claim"]`` when it is done but not yet answered; what
    they raise is what the caller meets, and what they return is awaited if it can be.
    """

    def __init__(self, **choices: Any) -> None:
        super().__init__(**choices)
        self.calls: list[str] = []
        self.before: dict[str, Disturbance] = {}
        self.after: dict[str, Disturbance] = {}

    def fail(self, *verbs: str, error: BaseException) -> None:
        """Have verbs fail until ``recover``."""

        def failing() -> None:
            raise error

        self.before.update(dict.fromkeys(verbs, failing))

    def recover(self) -> None:
        self.before.clear()
        self.after.clear()

    async def _stage(self, verb: str, action: Callable[[], Awaitable[Any]]) -> Any:
        self.calls.append(verb)
        for moment in (self.before, self.after):
            if verb in moment:
                done = moment[verb]()
                if inspect.isawaitable(done):
                    await done
            if moment is self.before:
                answer = await action()
        return answer

    async def claim(self, claim: Claim) -> Decision:
        return await self._stage("claim", lambda: MemoryStore.claim(self, claim))

    async def complete(self, completion: Completion) -> Ending:
        return await self._stage("complete", lambda: MemoryStore.complete(self, completion))

    async def get(self, key: str) -> Record | None:
        return await self._stage("get", lambda: MemoryStore.get(self, key))

    async def claim_many(self, claims: Sequence[Claim]) -> list[Decision]:
        async def all_of_them() -> list[Decision]:
            return [await MemoryStore.claim(self, claim) for claim in claims]

        return await self._stage("claim_many", all_of_them)

    async def complete_many(self, completions: Sequence[Completion]) -> list[Ending]:
        async def all_of_them() -> list[Ending]:
            return [await MemoryStore.complete(self, completion) for completion in completions]

        return await self._stage("complete_many", all_of_them)

    async def renew(self, renewal: Renewal) -> bool:
        return await self._stage("renew", lambda: MemoryStore.renew(self, renewal))

    async def renew_many(self, renewals: Sequence[Renewal]) -> list[bool]:
        async def all_of_them() -> list[bool]:
            return [await MemoryStore.renew(self, renewal) for renewal in renewals]

        return await self._stage("renew_many", all_of_them)

    async def scan(self, *args: Any, **choices: Any) -> list[Record]:
        return await self._stage("scan", lambda: MemoryStore.scan(self, *args, **choices))
