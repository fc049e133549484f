"""Records in this process's memory: for tests, for one process, and as the plainest picture of a store."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from math import inf

from .._fork import tell_of_forks
from .._protocol import decide_claim, decide_ending, decide_renewal, is_expired
from .._records import Claim, Completion, Decision, Ending, Record, Renewal, State
from ..errors import StoreClosed, UsageError
from ._urls import shown
from .base import Features, Store, StoreStats

WHEEL_SECONDS = 64.0
"""Records due within the same minute or so are looked at together."""
PURGE_PER_CLAIM = 4
"""How many due records a new claim looks at: more than it adds, so that traffic alone keeps the store bounded."""


class MemoryStore(Store):
    """A dictionary under a lock. ``clock`` is the store's clock, in seconds; tests move it by hand."""

    features = Features(durable=False, shared=False, purge_delay=WHEEL_SECONDS)

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._records: dict[str, Record] = {}
        self._floor = 0
        self._wheel: dict[int, list[str]] = {}  # slot of time -> keys to look at when it has passed
        self._due = inf
        tell_of_forks(self)

    @classmethod
    def from_url(cls, url: str, options: dict[str, str]) -> MemoryStore:
        """``memory://`` has nothing to say beyond its scheme."""
        if url != "memory://":
            raise UsageError(
                f"{shown(url)!r} says more than memory:// can mean; records live in this process alone."
            )
        return cls()

    async def claim(self, claim: Claim) -> Decision:
        """Decide one claim."""
        with self._lock:
            now = self._clock()
            record = self._records.get(claim.key)
            decision = decide_claim(record, claim, now, self._floor)
            after = decision.record
            if after is not record and after is not None:
                self._records[claim.key] = after
                if record is None:
                    try:
                        self._wheel[int(after.expires_at / WHEEL_SECONDS) + 1].append(claim.key)
                    except KeyError:
                        self._look_later(after)
                    if now >= self._due:
                        self._purge(now, PURGE_PER_CLAIM)
            return decision

    async def renew(self, renewal: Renewal) -> bool:
        """Extend a lease."""
        with self._lock:
            renewed = decide_renewal(self._records.get(renewal.key), renewal, self._clock())
            if renewed is not None:
                self._records[renewal.key] = renewed
            return renewed is not None

    async def complete(self, completion: Completion) -> Ending:
        """End a claim."""
        with self._lock:
            record = self._records.get(completion.key)
            ending, after = decide_ending(record, completion, self._clock())
            if after is not record and after is not None:
                self._records[completion.key] = after
            return ending

    async def get(self, key: str) -> Record | None:
        """Read a record."""
        self._clock()  # which says so where the store was closed
        return self._records.get(key)

    async def purge(self, limit: int = 256) -> int:
        """Look at up to ``limit`` records that are due and forget the expired ones."""
        with self._lock:
            return self._purge(self._clock(), limit)

    async def scan(self, state: State | None = None, after: str = "", limit: int = 256) -> list[Record]:
        """Records in key order."""
        with self._lock:
            self._clock()  # likewise
            found = [
                r for r in self._records.values() if r.key > after and (state is None or r.state is state)
            ]
        return sorted(found)[:limit]

    async def now(self) -> float:
        """The store's clock."""
        return self._clock()

    async def stats(self) -> StoreStats:
        """Count what is there."""
        with self._lock:
            records, now = list(self._records.values()), self._clock()
        pending = [r for r in records if r.state is State.PENDING]
        return StoreStats(
            keys=len(records),
            bytes=sum(len(r.key) + len(r.fingerprint) + len(r.result or b"") for r in records),
            by_state=dict(Counter(r.state.name for r in records)),
            oldest_pending_lease=min((r.lease_until - now for r in pending), default=None),
            expired=sum(is_expired(r, now) for r in records),
        )

    def close(self) -> None:
        """Forget everything."""
        self._clock = _closed
        self._records.clear()

    def before_fork(self) -> None:
        """Let nobody be in the middle of a change."""
        self._lock.acquire()

    def after_fork(self, *, in_child: bool) -> None:
        """Go on; the child with a copy that is its own from now on."""
        self._lock.release()

    def _look_later(self, record: Record) -> None:
        slot = int(record.expires_at / WHEEL_SECONDS) + 1
        keys = self._wheel.get(slot)
        if keys is None:
            self._wheel[slot] = [record.key]
            self._due = min(self._due, slot * WHEEL_SECONDS)
        else:
            keys.append(record.key)

    def _purge(self, now: float, limit: int) -> int:
        gone = 0
        for _ in range(limit):
            if now < self._due:
                break
            slot = int(self._due / WHEEL_SECONDS)
            record = self._records[self._wheel[slot].pop()]
            if not self._wheel[slot]:
                del self._wheel[slot]
                self._due = min(self._wheel, default=inf) * WHEEL_SECONDS
            if is_expired(record, now):
                del self._records[record.key]
                self._floor = max(self._floor, record.fence)
                gone += 1
            else:
                self._look_later(record._replace(expires_at=max(record.expires_at, now)))
        return gone


def _closed() -> float:
    raise StoreClosed("The store was closed, so nothing was run. Make a new receiver.")
