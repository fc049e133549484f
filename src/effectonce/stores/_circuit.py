"""A circuit breaker around a store: while it is away, callers are refused at once instead of waiting for it.

It watches every command. When too many fail or take too long, the circuit opens, and new claims get
``StoreUnavailable`` with the time until the next look. Then one claim is let through: if it is answered the circuit
closes, without a restart. Endings and renewals always go through, since whoever sends them has run already; their
answers count too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Literal

from .._durations import Duration, seconds
from ..errors import StoreClosed, StoreError, StoreUnavailable, UsageError
from .base import PartlyAnswered

CircuitState = Literal["closed", "open", "half_open"]

MOST_SERVERS = 1024
"""Circuits of single servers that are remembered."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """When a circuit opens, and when it looks again.

    errors        so many failures in a row open it
    failure_rate  so does this share of failures among the commands of a window,
    slow_rate     or this share of commands that took longer than ``slow``,
    calls         of at least so many
    window        how long a command counts
    recovery      how long an open circuit stays open before one claim may try again

    How long a single command may take is the store's own ``timeout``.
    """

    errors: int = 5
    failure_rate: float = 0.5
    slow_rate: float = 0.8
    slow: Duration = "2s"
    calls: int = 20
    window: Duration = "30s"
    recovery: Duration = "5s"

    def __post_init__(self) -> None:
        for name in ("slow", "window", "recovery"):
            object.__setattr__(self, name, seconds(getattr(self, name), name))
        for name in ("errors", "calls"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)!r} must be a whole number, 1 or more.")
        for name in ("failure_rate", "slow_rate"):
            if not isinstance(getattr(self, name), int | float) or not 0 < getattr(self, name) <= 1:
                raise UsageError(f"{name}={getattr(self, name)!r} must be a share: more than 0, at most 1.")


class Circuit:
    """The state of one circuit. ``told`` hears in a few words of every change."""

    def __init__(
        self,
        breaker: Breaker,
        monotonic: Callable[[], float] = time.monotonic,
        told: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.breaker = breaker
        self.monotonic = monotonic
        self.told = told
        self.closed = True
        self.asked: set[object] = set()
        """Whose claims and endings are on their way. Whoever closes waits for them, for what is granted has to be given
        back."""
        self._slow, self._window, self._recovery = (
            seconds(breaker.slow),
            seconds(breaker.window),
            seconds(breaker.recovery),
        )
        self._lock = threading.Lock()
        self._look_at = inf
        self._looking = False
        self._in_a_row = 0
        self._failed_at = -inf
        self._why = ""
        self._shut = ""
        self._may_pass: Callable[[], bool] = bool
        self._servers: dict[Hashable, Circuit] = {}
        self._start_over()

    def at(self, place: Hashable) -> Circuit:
        """The circuit of one of the store's servers, where each may be away by itself."""
        if place is None:
            return self
        with self._lock:
            circuit = self._servers.get(place)
            if circuit is None:
                if len(self._servers) >= MOST_SERVERS:  # addresses come and go
                    self._servers.clear()
                circuit = self._servers[place] = Circuit(self.breaker, self.monotonic, self.told)
                circuit.asked = self.asked
                if self._shut:
                    circuit.shut(self._shut, self._may_pass)
            return circuit

    @contextmanager
    def asking(self) -> Iterator[None]:
        """While many are asked for together."""
        many = object()
        try:
            self.asked.add(many)
            yield
        finally:
            self.asked.discard(many)

    def before_fork(self) -> None:
        """Nothing to bring to rest: a child begins with a lock of its own."""

    def after_fork(self, *, in_child: bool) -> None:
        """What the parent's threads were about is not the child's."""
        if in_child:
            self.asked.clear()
            for circuit in (self, *self._servers.values()):
                circuit._lock = threading.Lock()

    @property
    def state(self) -> CircuitState:
        """Whether claims go through, are refused, or one of them is having a look."""
        if self.closed:
            return "closed"
        return "half_open" if self._looking or self.monotonic() >= self._look_at else "open"

    def admit(self) -> None:
        """Let a claim through an open circuit if it is time to look, else refuse it."""
        with self._lock:
            if self.closed:
                return
            if self._shut:
                if self._may_pass():
                    return
                raise StoreClosed(self._shut)
            now = self.monotonic()
            if now >= self._look_at:
                # Also the time for another look, should this one never end.
                self._look_at = now + self._recovery
                self._looking = True
                return
            left = self._look_at - now
        refusal = StoreUnavailable(
            f"The store has been away ({self._why}), so it is not asked for another {left:.1f} s; nothing was run. "
            "Try again then.",
            retry_after=left,
        )
        refusal.sent = False
        raise refusal

    def shut(self, why: str, unless: Callable[[], bool] = lambda: False) -> None:
        """Let no claim through any more, ``unless`` it may pass: whoever had the store open is done with it."""
        with self._lock:
            self.closed, self._shut, self._may_pass = False, why, unless
            servers = list(self._servers.values())
        for circuit in servers:
            circuit.shut(why, unless)

    def answered(self, took: float) -> None:
        """A command was answered after so many seconds."""
        self._good += 1
        self._in_a_row = 0
        if took >= self._slow:
            self._count(slow=1, why=f"it answers after {took:.1f} s")
        elif not self.closed:
            self._close()

    def failed(self, error: StoreError, started: float) -> None:
        """A command that was sent at ``started`` was not answered. (Or in part, or wrongly: then the store is there.)

        All that were under way on a connection fail with it at once. That is one failure, not one in a row for each of
        them, or a crowd that has lost a single connection would find the circuit open when it asks again.
        """
        now = self.monotonic()
        if isinstance(error, PartlyAnswered) or not isinstance(error, StoreUnavailable):
            self.answered(now - started)
            return
        if started < self._failed_at and now - started < self._slow:
            return
        self._failed_at = now
        self._in_a_row += 1
        # Without the key: others are told why, too, and it may be another tenant's.
        self._count(failed=1, why=str(error).removesuffix(f" [key {error.key}]"))

    def _count(self, *, failed: int = 0, slow: int = 0, why: str) -> None:
        with self._lock:
            now = self.monotonic()
            if now >= self._counted_since + self._window:
                self._start_over()
            self._failures += failed
            self._slow_ones += slow
            if not self.closed:
                self._look_at, self._looking, self._why = now + self._recovery, False, why
                return
            breaker, calls = self.breaker, self._good + self._failures
            enough = calls >= breaker.calls
            if not (
                self._in_a_row >= breaker.errors
                or (enough and self._failures >= breaker.failure_rate * calls)
                or (enough and self._slow_ones >= breaker.slow_rate * calls)
            ):
                return
            self.closed, self._look_at, self._why = False, now + self._recovery, why
        self.told(f"opened: {why}")

    def _close(self) -> None:
        with self._lock:
            if self.closed or self._shut:
                return
            self.closed, self._looking, self._look_at = True, False, inf
            self._in_a_row = 0
            self._start_over()
        self.told("closed: the store answers again")

    def _start_over(self) -> None:
        self._counted_since = self.monotonic()
        self._good = self._failures = self._slow_ones = 0
