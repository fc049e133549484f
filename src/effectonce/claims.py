"""A claim as a block: for code that is neither a function nor a message handler."""

from __future__ import annotations

from collections.abc import Awaitable, Generator, Iterator
from contextlib import contextmanager
from contextvars import Token
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ._attempt import CURRENT, Attempt, here, take_back
from ._blocking import run
from .errors import ColourMismatch, UsageError

if TYPE_CHECKING:
    from ._answers import Call
    from ._colours import Colour
    from ._messages import Outcome
    from ._receiver import Receiver


class Claiming:
    """``with receiver.claim("key") as claim`` — also ``async with``.

    ``claim.first`` says whether this block has to do the work. It then ends with ``claim.complete(value)``, which is
    awaited in an ``async with`` (``await claim.acomplete(value)`` is the same); leaving the block without it completes
    with None, leaving it by an exception does what the policy says of that exception. ``claim.value`` is the first
    result, for everyone.
    """

    def __init__(self, receiver: Receiver, call: Call) -> None:
        self._receiver, self._call = receiver, call
        self._attempt: Attempt | None = None
        self._outcome: Outcome[Any] | None = None
        self._token: Token[Attempt] | None = None
        self._awaits: bool | None = None
        self._said: _Said | None = None

    @property
    def first(self) -> bool:
        """Whether this block runs the effect. False: it was done before, and ``value`` has its result."""
        return self._attempt is not None

    @property
    def value(self) -> Any:
        """The result, once there is one."""
        return self.outcome.value

    @property
    def outcome(self) -> Outcome[Any]:
        """What became of this claim."""
        if self._outcome is None:
            raise UsageError("This claim has no outcome yet. Call complete(value) first.", key=self._call.key)
        return self._outcome

    @property
    def attempt(self) -> Attempt:
        """The running attempt, with its fence."""
        if self._attempt is None:
            raise UsageError("This block does not run the effect; it was done before.", key=self._call.key)
        return self._attempt

    def complete(self, value: Any = None) -> Any:
        """Record the result, then return it. The answer of another attempt counts if this one lost its lease.

        In an ``async with`` it is to be awaited; what nobody has awaited is recorded when the block is left.
        """
        if self._awaits:
            self._has_none_yet()
            self._said = _Said(self, value)
            return self._said
        self._colour_is(awaits=False, instead="await claim.acomplete(value)")
        return run(self._complete(self._receiver.blocking, value))

    async def acomplete(self, value: Any = None) -> Any:
        """``complete`` for ``async with``."""
        self._colour_is(awaits=True, instead="claim.complete(value)")
        self._has_none_yet()
        return await self._complete(self._receiver.asyncio, value)

    def __enter__(self) -> Self:
        with self._unless_interrupted(self._receiver.blocking):
            return run(self._enter(self._receiver.blocking))

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._unless_interrupted():
            run(self._exit(self._receiver.blocking, error))

    async def __aenter__(self) -> Self:
        with self._unless_interrupted(self._receiver.asyncio):
            return await self._enter(self._receiver.asyncio)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._unless_interrupted():
            await self._exit(self._receiver.asyncio, error)

    @contextmanager
    def _unless_interrupted(self, entering: Colour | None = None) -> Iterator[None]:
        """Ctrl-C on the way into the block or out of it: its lease must not be kept. On the way in it is given back."""
        flow, claim = self._receiver.flow, self._call.claim
        try:
            yield
        except BaseException as error:
            flow.keeper.abandon(claim)
            if entering is not None and self._attempt is not None:
                flow.interrupted(entering, claim, error)
            raise

    async def _enter(self, colour: Colour) -> Self:
        if self._awaits is not None:
            raise UsageError("A claim can be entered once. Ask the receiver for another.", key=self._call.key)
        self._awaits = colour.awaits
        opened = await self._receiver.flow.open(colour, self._call)
        if isinstance(opened, Attempt):
            self._attempt = opened
            opened.line = here()
            self._token = CURRENT.set(opened)
        else:
            self._outcome = opened.unwrap()
        return self

    async def _complete(self, colour: Colour, value: Any) -> Any:
        self._has_none_yet()
        try:
            self._outcome = await self._receiver.flow.finish(colour, self._call, self.attempt, value)
        except BaseException:  # a cancellation, perhaps, that is heard when the result has been recorded
            self._outcome = self.attempt.outcome
            raise
        return self._outcome.unwrap().value

    async def _exit(self, colour: Colour, error: BaseException | None) -> None:
        if self._attempt is None:
            return
        assert self._token is not None
        take_back(CURRENT, self._token)
        if self._outcome is not None or self._attempt.unrecorded is not None:
            return
        said, self._said = self._said, None
        if error is None:
            await self._complete(colour, None if said is None else said.value)
        elif said is not None:  # what was completed is completed, and the exception goes on to the caller
            self._outcome = await self._receiver.flow.finish(colour, self._call, self._attempt, said.value)
        else:
            self._outcome = await self._receiver.flow.fail(colour, self._call, self._attempt, error)

    def _has_none_yet(self) -> None:
        carried = self._attempt is not None and self._attempt.unrecorded is not None
        if self._outcome is not None or self._said is not None or carried:
            raise UsageError("This claim has its result already.", key=self._call.key)

    def _colour_is(self, *, awaits: bool, instead: str) -> None:
        if self._awaits is None:
            raise UsageError("This claim has not been entered. Write `with receiver.claim(...) as claim:`.")
        if self._awaits is not awaits:
            raise ColourMismatch(f"This block has the other colour; use {instead}.", key=self._call.key)


class _Said(Awaitable[Any]):
    """A result that was named in an ``async with`` and is not recorded yet: awaiting it does that."""

    def __init__(self, claiming: Claiming, value: Any) -> None:
        self._claiming, self.value = claiming, value

    def __await__(self) -> Generator[Any, Any, Any]:
        claiming = self._claiming
        claiming._said = None
        return claiming._complete(claiming._receiver.asyncio, self.value).__await__()
