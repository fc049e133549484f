"""Sessions in this process's memory."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from .._blocking import run
from .._fork import tell_of_forks
from .._records import Record
from ..stores.base import Features, StoreStats
from ..stores.memory import MemoryStore
from ._rules import Session, is_dropped, parts_of
from ._store import DeskStore, Sight

LOOKED_AT = 4
"""How many sessions a new one looks at: more than it adds, so that traffic alone keeps them bounded."""


class _Kept:
    __slots__ = ("requests", "session")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.requests: dict[int, Record] = {}


class MemorySessions(DeskStore):
    """A dictionary of sessions under a lock; each has its requests by number."""

    features = Features(durable=False, shared=False)

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.sessions: dict[str, _Kept] = {}
        self._lock = threading.Lock()
        self._looked_at: list[str] = []
        tell_of_forks(self)

    @classmethod
    def beside(cls, store: MemoryStore) -> MemorySessions:
        """Sessions on the same clock as a store's records."""
        return cls(store._clock)

    async def at_desk(self, work: Any) -> Any:
        with self._lock:
            return run(work(self))

    # The desk

    async def look(self, session: str, key: str | None = None) -> Sight:
        """Read a session and a request."""
        now, kept = self.clock(), self.sessions.get(session)
        if kept is None:
            return Sight(None, None, now)
        return Sight(kept.session, kept.requests.get(parts_of(key)[1]) if key else None, now)

    async def write(self, session: Session, is_new: bool, drops: bool) -> None:
        """Write a session."""
        now = self.clock()
        if is_new:
            self._collect(now, LOOKED_AT)
            self.sessions[session.id] = _Kept(session)
        kept = self.sessions[session.id]
        kept.session = session
        if drops:
            gone = [n for n, record in kept.requests.items() if n < session.low and is_dropped(record, now)]
            for number in gone:
                del kept.requests[number]

    async def put(self, session: str, number: int, record: Record, is_new: bool) -> None:
        """Write a request."""
        self.sessions[session].requests[number] = record

    async def drop(self, session: str, number: int | None = None) -> None:
        """Forget a request or a session."""
        if number is None:
            self.sessions.pop(session, None)
        else:
            self.sessions[session].requests.pop(number, None)

    # Everything else

    async def purge(self, limit: int = 256) -> int:
        """Look at ``limit`` sessions and forget those whose lease is over."""
        with self._lock:
            return self._collect(self.clock(), limit)

    def _collect(self, now: float, limit: int) -> int:
        gone = 0
        for _ in range(limit):
            if not self._looked_at:
                self._looked_at = list(self.sessions)
                if not self._looked_at:
                    break
            name = self._looked_at.pop()
            kept = self.sessions.get(name)
            if kept is not None and kept.session.lease_until <= now:
                del self.sessions[name]
                gone += 1
        return gone

    async def now(self) -> float:
        """The store's clock."""
        return self.clock()

    async def stats(self) -> StoreStats:
        """Count what is there."""
        with self._lock:
            records = [record for kept in self.sessions.values() for record in kept.requests.values()]
        return StoreStats(
            keys=len(records),
            bytes=sum(len(r.fingerprint) + len(r.result or b"") for r in records),
            by_state=dict(Counter(record.state.name for record in records)),
        )

    def before_fork(self) -> None:
        """Let nobody be in the middle of a change."""
        self._lock.acquire()

    def after_fork(self, *, in_child: bool) -> None:
        """Go on; the child with a copy that is its own from now on."""
        self._lock.release()
