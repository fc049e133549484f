"""One attempt at an effect: what a handler can ask about itself while it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from . import keys
from .errors import LeaseLost, UsageError

if TYPE_CHECKING:
    from ._records import Claim, Completion, Guarantee

RENEW_SHARE = 3.0
"""A lease is renewed after a third of it, so that two renewals may fail before it ends."""


class Attempt:
    """The running attempt, as ``current()`` gives it to a handler.

    ``key`` names the effect, ``fence`` is the token to hand to anything that checks for stale writers, ``number``
    counts attempts at this key.
    """

    # Most attempts end untroubled: what trouble would set is a default of the class, and costs them nothing.
    ending = False
    ended = False
    outcome: Any = None
    cancelled: BaseException | None = None
    recorded: Completion | None = None
    unrecorded: Completion | None = None
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
        self.started = self._held_since = started
        self._monotonic = monotonic

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
        """A key for a call downstream, the same on every attempt: the sink can dedupe on it."""
        return keys.derived(self.key, name)

    # What follows is for the flow and the keeper.

    @property
    def deadline(self) -> float:
        """When the lease ends on the local clock: counted from when it was asked for, so never too late."""
        return self._held_since + self.claim.lease

    @property
    def renew_at(self) -> float:
        """When the keeper has to look after this attempt."""
        return self._held_since + self.claim.lease / RENEW_SHARE if self._renew_at is None else self._renew_at

    def hold(self, asked_at: float) -> None:
        """The lease was renewed."""
        self._held_since = asked_at
        self._renew_at = None

    def postpone(self, until: float) -> None:
        """The store did not answer; try again then."""
        self._renew_at = until

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

    def end(self, outcome: Any) -> None:
        """Let those who wait for this attempt go on. Its record is written by now, or never will be."""
        self.outcome = outcome
        self.ended = True
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


CURRENT: ContextVar[Attempt] = ContextVar("effectonce_attempt")


def current() -> Attempt:
    """The attempt that is running here. Outside a handler there is none, which is an error."""
    try:
        return CURRENT.get()
    except LookupError:
        raise UsageError("current() works only inside a handler that a Receiver runs.") from None
