"""A circuit breaker around a store: while it is away, callers are refused at once instead of waiting for it.

It watches every command. When too many fail or take too long, the circuit opens, and new claims get
``StoreUnavailable`` with the time until the next look. Then one claim is let through: if it is answered the circuit
closes, without a restart. Endings and renewals always go through, since whoever sends them has run already; their
answers count too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, TypeVar

from .._durations import Duration, seconds
from .._records import Claim, Completion, Decision, Ending, Record, Renewal, State
from ..errors import StoreClosed, StoreError, StoreUnavailable, UsageError
from .base import PartlyAnswered, Store, StoreStats

T = TypeVar("T")

CircuitState = Literal["closed", "open", "half_open"]


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
        self._start_over()

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
        self._count(failed=1, why=str(error))

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


class GuardedStore(Store):
    """A store behind a circuit."""

    def __init__(self, store: Store, circuit: Circuit) -> None:
        self.store, self.circuit = store, circuit
        self.features = store.features

    async def claim(self, claim: Claim) -> Decision:
        """Ask for a key, unless the circuit is open."""
        circuit = self.circuit
        if not circuit.closed:
            circuit.admit()
        started = circuit.monotonic()
        try:
            decision = await self.store.claim(claim)
        except StoreError as error:
            circuit.failed(error, started)
            raise
        circuit.answered(circuit.monotonic() - started)
        return decision

    async def claim_many(self, claims: Sequence[Claim]) -> list[Decision]:
        """Ask for many keys, unless the circuit is open."""
        if not self.circuit.closed:
            self.circuit.admit()
        return await self._watched(self.store.claim_many(claims))

    async def complete(self, completion: Completion) -> Ending:
        """End a claim, whatever the circuit says."""
        circuit = self.circuit
        started = circuit.monotonic()
        try:
            ending = await self.store.complete(completion)
        except StoreError as error:
            circuit.failed(error, started)
            raise
        circuit.answered(circuit.monotonic() - started)
        return ending

    async def complete_many(self, completions: Sequence[Completion]) -> list[Ending]:
        """End many claims, whatever the circuit says."""
        return await self._watched(self.store.complete_many(completions))

    async def renew(self, renewal: Renewal) -> bool:
        """Extend a lease, whatever the circuit says."""
        return await self._watched(self.store.renew(renewal))

    async def renew_many(self, renewals: Sequence[Renewal]) -> list[bool]:
        """Extend many leases, whatever the circuit says."""
        return await self._watched(self.store.renew_many(renewals))

    async def get(self, key: str) -> Record | None:
        """Read a record."""
        return await self._watched(self.store.get(key))

    async def watch(self, record: Record, seconds: float) -> bool:
        """Wait for a record's end; how long that takes says nothing about the store."""
        return await self.store.watch(record, seconds)

    async def purge(self, limit: int = 256) -> int:
        """Forget what has expired."""
        return await self._watched(self.store.purge(limit))

    async def scan(self, state: State | None = None, after: str = "", limit: int = 256) -> list[Record]:
        """Read many records; that may take long."""
        return await self.store.scan(state, after, limit)

    async def now(self) -> float:
        """The store's clock. It may be this machine's own, so that an answer says nothing about the store."""
        return await self.store.now()

    async def stats(self) -> StoreStats:
        """Count records; that may take long."""
        return await self.store.stats()

    def for_blocking(self) -> Store:
        """The store's own view for callers without an event loop, behind the same circuit."""
        return GuardedStore(self.store.for_blocking(), self.circuit)

    def for_asyncio(self) -> Store:
        """The store's own view for callers on an event loop, behind the same circuit."""
        return GuardedStore(self.store.for_asyncio(), self.circuit)

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    async def _watched(self, command: Awaitable[T]) -> T:
        circuit = self.circuit
        started = circuit.monotonic()
        try:
            answer = await command
        except StoreError as error:
            circuit.failed(error, started)
            raise
        circuit.answered(circuit.monotonic() - started)
        return answer
