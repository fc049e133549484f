"""The keeper: one thread that renews all leases of a receiver together, whatever its handlers are doing.

It runs beside handlers and event loops, so a blocked one can't stop it. A *denied* renewal means the attempt is
lost at once. A renewal that *errs* is tried again until the lease is about to end on the local monotonic clock.
It also carries home the endings that could not be written when their handlers finished.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from ._attempt import Attempt
from ._blocking import run
from ._records import Ending, Renewal

if TYPE_CHECKING:
    from .stores.base import Store

RETRY_SHARE = 12.0
"""After an error a renewal is tried again at a twelfth of the lease."""
LINGER_SECONDS = 5.0
"""How long the thread stays after its last attempt has ended."""


class Keeper:
    """Knows every live attempt of one receiver, and keeps it alive."""

    def __init__(self, store: Store, monotonic: Callable[[], float], lost: Callable[[Attempt, str], None]) -> None:
        self.live: dict[str, Attempt] = {}
        self._store = store
        self._monotonic = monotonic
        self._tell_lost = lost
        self._wake_at = inf
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, attempt: Attempt) -> None:
        """Keep an attempt's lease alive from now on. An older attempt at the same key is lost by this."""
        older = self.live.get(attempt.key)
        self.live[attempt.key] = attempt
        if older is not None:
            older.lose()
        if attempt.renew_at < self._wake_at or self._thread is None:
            self._rouse(attempt.renew_at)

    def forget(self, attempt: Attempt) -> None:
        """Stop renewing: the attempt has ended, or has to be left to its lease."""
        if self.live.get(attempt.key) is attempt:
            del self.live[attempt.key]

    async def tick(self, store: Store, now: float) -> float:
        """Renew what is due at ``now`` and say when to come back."""
        attempts = list(self.live.values())
        for attempt in attempts:
            if attempt.unrecorded is not None and now >= attempt.renew_at:
                await self._record(store, attempt, now)
        due = [a for a in attempts if a.unrecorded is None and now >= a.renew_at]
        if due:
            await self._renew(store, due, now)
        return min((attempt.renew_at for attempt in list(self.live.values())), default=inf)

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._wake.set()

    def after_fork(self) -> None:
        """The parent's attempts and thread are not the child's."""
        self.live, self._wake_at, self._thread = {}, inf, None
        self._wake, self._lock = threading.Event(), threading.Lock()

    async def _renew(self, store: Store, due: list[Attempt], now: float) -> None:
        try:
            held = await store.renew_many(
                [Renewal(a.key, a.claim.owner, a.fence, a.claim.lease, a.claim.keep) for a in due]
            )
        except Exception as error:  # whatever a driver throws, the thread has to live on
            for attempt in due:
                self._postpone(attempt, now, f"the store did not answer: {error}")
            return
        for attempt, still in zip(due, held, strict=True):
            if still:
                attempt.hold(now)
            elif not attempt.ended:
                self._lose(attempt, "another attempt took over")

    async def _record(self, store: Store, attempt: Attempt, now: float) -> None:
        assert attempt.unrecorded is not None
        try:
            ending = await store.complete(attempt.unrecorded)
        except Exception as error:
            self._postpone(attempt, now, f"its ending could not be written: {error}")
            return
        if ending is Ending.FENCED:
            self._lose(attempt, "its ending came too late")
        else:
            self.forget(attempt)

    def _postpone(self, attempt: Attempt, now: float, why: str) -> None:
        pause = attempt.claim.lease / RETRY_SHARE
        if now + pause >= attempt.deadline:
            self._lose(attempt, why)
        else:
            attempt.renew_at = now + pause

    def _lose(self, attempt: Attempt, why: str) -> None:
        self.forget(attempt)
        attempt.lose()
        self._tell_lost(attempt, why)

    def _rouse(self, at: float) -> None:
        with self._lock:
            self._wake_at = min(self._wake_at, at)
            self._wake.set()
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="effectonce-keeper", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._closed:
            with self._lock:
                self._wake.clear()
                left = self._wake_at - self._monotonic()
            if left > 0:
                woken = self._wake.wait(min(left, LINGER_SECONDS))
                if self._may_leave(woken):
                    return
                continue
            with self._lock:
                self._wake_at = inf  # an attempt that comes during the tick sets it again
            due = run(self.tick(self._store, self._monotonic()))
            with self._lock:
                self._wake_at = min(self._wake_at, due)

    def _may_leave(self, woken: bool) -> bool:
        with self._lock:
            if woken or self._wake_at < inf or self.live:
                return False
            self._thread = None
            return True
