"""One attempt at an effect: what a handler can ask about itself while it runs."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar, Token
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from . import keys
from ._blocking import run
from .errors import LeaseLost, UsageError

if TYPE_CHECKING:
    from ._flow import Flow
    from ._records import Claim, Completion, Guarantee
    from .policy import Policy
    from .steps import Journal, Step

R = TypeVar("R")
T = TypeVar("T")

STEP_OPERATION = "step"
"""The operation in the key of a step that is recorded in a transaction of the user's."""
RENEW_SHARE = 3.0
"""A lease is renewed after a third of it, so that two renewals may fail before it ends."""


class Attempt:
    """The running attempt, as ``current()`` gives it to a handler.

    ``key`` names the effect, ``fence`` is the token to hand to anything that checks for stale writers, ``number``
    counts attempts at this key.
    """

    flow: Flow
    policy: Policy
    party: object = None
    """The same for all that were claimed in one batch, and are recorded together."""
    outer: Attempt | None = None
    """The attempt whose handler has begun this one, where that is worth remembering: in a transaction."""

    # Most attempts end untroubled: what trouble would set is a default of the class, and costs them nothing.
    ending = False
    ended = False
    outcome: Any = None
    cancelled: BaseException | None = None
    recorded: Completion | None = None
    unrecorded: Completion | None = None
    carried_since = 0.0
    progress: bytes | None = None
    journal: Journal | None = None
    _lost = False
    _renew_at: float | None = None
    _on_end: list[Callable[[], object]] | None = None
    _on_lost: Callable[[], object] | None = None

    def __init__(
        self, claim: Claim, fence: int, number: int, started: float, monotonic: Callable[[], float]
    ) -> None:
        self.claim = claim
        self.fence = fence
        self.number = number
        self.started = started
        self.deadline = started + claim.lease
        """When the lease ends on the local clock: counted from when it was asked for, so never too late."""
        self._monotonic = monotonic
        self.line: object = get_ident()
        """The thread, or the task, that its handler runs in."""

    @property
    def key(self) -> str:
        """The effect's name."""
        return self.claim.key

    @property
    def guarantee(self) -> Guarantee:
        """The rung of the guarantee ladder this attempt stands on."""
        return "at_most_once" if self.claim.once else "fenced"

    @property
    def lost(self) -> bool:
        """Whether the lease is gone: another attempt may be running, so stop before the next effect."""
        return self._lost or self._monotonic() >= self.deadline

    def check(self) -> None:
        """Raise ``LeaseLost`` if the lease is gone. Call it right before an effect that can't be undone."""
        if self.lost:
            raise LeaseLost("The lease of this attempt is over; another may have taken over.", key=self.key)

    def key_for(self, name: str) -> str:
        """A key for a call downstream, the same on every attempt: the sink can dedupe on it. Each step has its own."""
        return keys.derived(self.part.key, name)

    def step(
        self,
        name: str,
        function: Callable[..., R],
        /,
        *args: Any,
        on: Any = None,
        version: int = 1,
        **kwargs: Any,
    ) -> R:
        """Run a part of the handler that is finished for good when this returns: no later attempt runs it again.

        name      what its result is remembered under; each step of a handler has its own
        on        a connection whose transaction the function writes in: the step is then recorded there, and
                  committed with what it wrote
        version   raise it for a step that has come to stand at another point of the handler
        """
        from ._handlers import hint_of
        from .steps import Step

        step, home = Step(self, name, hint=hint_of(function), version=version), self.flow.home
        if on is None:
            return cast("R", run(step.call(home.blocking, function, args, kwargs)))
        return cast("R", run(step.call_on(on, function, args, kwargs, awaits=False)))

    @overload
    async def astep(
        self,
        name: str,
        function: Callable[..., Awaitable[R]],
        /,
        *args: Any,
        on: Any = None,
        version: int = 1,
        **kwargs: Any,
    ) -> R: ...
    @overload
    async def astep(
        self,
        name: str,
        function: Callable[..., R],
        /,
        *args: Any,
        on: Any = None,
        version: int = 1,
        **kwargs: Any,
    ) -> R: ...
    async def astep(
        self,
        name: str,
        function: Callable[..., Any],
        /,
        *args: Any,
        on: Any = None,
        version: int = 1,
        **kwargs: Any,
    ) -> Any:
        """``step`` for handlers on an event loop; the function may be a coroutine function, or a plain one."""
        from ._handlers import hint_of
        from .steps import Step

        step, home = Step(self, name, hint=hint_of(function), version=version), self.flow.home
        if on is None:
            return await step.call(home.asyncio, function, args, kwargs)
        return await step.call_on(on, function, args, kwargs, awaits=True)

    def stepping(self, name: str, *, hint: Any = Any, version: int = 1) -> Step:
        """A step as a block: ``with attempt.stepping("reserve") as step``, or ``async with``.

        ``hint`` is the type of its result, where that is none of plain data.
        """
        from .steps import Step

        return Step(self, name, hint=hint, version=version)

    # What follows is for the flow, the keeper and the outbox.

    @property
    def part(self) -> Attempt | Step:
        """What runs here: a step of this attempt, or all of it."""
        step = STEP.get(None)
        return self if step is None or step.attempt is not self else step

    @property
    def renew_at(self) -> float:
        """When the keeper has to look after this attempt."""
        lease = self.claim.lease
        return self.deadline - lease + lease / RENEW_SHARE if self._renew_at is None else self._renew_at

    def hold(self, asked_at: float) -> None:
        """The lease was renewed: by the keeper, or by a step, and perhaps by both at a time."""
        self.deadline = max(self.deadline, asked_at + self.claim.lease)
        self._renew_at = None

    def postpone(self, until: float) -> None:
        """The store did not answer; try again then."""
        self._renew_at = until

    @property
    def was_told(self) -> bool:
        """Whether the lease is known to be gone, and not only by the local clock."""
        return self._lost

    @property
    def is_aside(self) -> bool:
        """Whether this is not where the handler runs, but a task or a thread that it has started."""
        return self.line not in (get_ident(), here())

    @property
    def is_stranded(self) -> bool:
        """Whether its handler waits on an event loop that was closed meanwhile, and so will never go on."""
        loop_of = getattr(self.line, "get_loop", None)  # a thread's number has none
        return loop_of is not None and loop_of().is_closed()

    def lose(self) -> None:
        """Tell the handler that its lease is gone."""
        if not self._lost:
            self._lost = True
            if self._on_lost is not None:
                self._on_lost()

    def when_lost(self, callback: Callable[[], object]) -> None:
        """Call back, from the keeper's thread, when the lease is lost."""
        self._on_lost = callback
        if self._lost:
            callback()

    def hear_cancelled(self) -> Any:
        """The cancellation that its caller has to hear of, once, now that all is recorded; None if there was none."""
        cancelled, self.cancelled = self.cancelled, None
        return cancelled

    def end(self, outcome: Any) -> None:
        """Let those who wait for this attempt go on. Its record is written by now, or never will be."""
        self.outcome = outcome
        self.ended = True
        if self.journal is not None:
            del self.journal  # else they would hold on to each other
        if self._on_end is not None:
            for callback in self._on_end:
                callback()

    def when_ended(self, callback: Callable[[], object]) -> None:
        """Call back when the attempt has ended, at once if it has; perhaps twice."""
        self.__dict__.setdefault("_on_end", []).append(callback)  # one step: several threads may wait
        if self.ended:
            callback()


class Unprotected(Attempt):
    """An attempt that nobody recorded, because the store was away and the policy says ``fallback="open"``."""

    guarantee: Guarantee = "none"  # pyright: ignore[reportIncompatibleMethodOverride]
    lost: bool = False  # pyright: ignore[reportIncompatibleMethodOverride]

    def end(self, outcome: Any) -> None:
        """The same; from now on its key may be run again."""
        self.flow.keeper.leave(self)
        super().end(outcome)


CURRENT: ContextVar[Attempt] = ContextVar("effectonce_attempt")
STEP: ContextVar[Step] = ContextVar("effectonce_step")


def take_back(variable: ContextVar[T], token: Token[T]) -> None:
    """Undo what a block set on its way in. It may be left elsewhere, as in a generator: nothing is set there."""
    with suppress(ValueError):
        variable.reset(token)


def here() -> object:
    """The task that runs here, or else the thread."""
    asyncio: Any = sys.modules.get("asyncio")
    loop = asyncio and asyncio._get_running_loop()
    return (loop and asyncio.current_task(loop)) or get_ident()


def surrounding() -> Iterator[Attempt]:
    """The attempts that this runs inside of, as far as they are known. An interruption may leave one that has ended."""
    attempt = CURRENT.get(None)
    while attempt is not None:
        if not attempt.ended:
            yield attempt
        attempt = attempt.outer


def current() -> Attempt:
    """The attempt that is running here. Outside a handler there is none, which is an error."""
    try:
        return CURRENT.get()
    except LookupError:
        raise UsageError("current() works only inside a handler that a Receiver runs.") from None
