"""How many new keys a caller may use, so that nobody fills the store with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from threading import Lock

from ._exchange import Problem


class Quota:
    """How many new keys each caller has used in this minute, as far as this process knows."""

    SECONDS = 60.0

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._until = 0.0
        self._used: Counter[str] = Counter()
        self._lock = Lock()

    def take(self, scope: str, limit: int) -> bool:
        """Set a new key aside for a caller; False if there is none left. Others may ask before it is used."""
        with self._lock:
            if self._monotonic() >= self._until:
                self._used.clear()  # of every caller, so that what is held is bounded by a minute's traffic
                self._until = self._monotonic() + self.SECONDS
            if self._used[scope] >= limit:
                return False
            self._used[scope] += 1
            return True

    def give_back(self, scope: str) -> bool:
        """A caller has not used the key that was set aside. Gives False: none is set aside any more."""
        with self._lock:
            self._used[scope] = max(self._used[scope] - 1, 0)
            return False

    def refusal(self) -> Problem:
        """What a new key gets now."""
        left = max(self._until - self._monotonic(), 0.0)
        return Problem(
            "too-many-keys", "Wait, then send the same request with the same key again.", retry_after=left
        )


class Share:
    """The one new key that a request may use, however often its transaction is run again."""

    def __init__(self, quota: Quota, scope: str, limit: int | None) -> None:
        self._quota, self._scope, self._limit = quota, scope, limit
        self._taken = False

    def take(self) -> bool:
        """Set the key aside, unless it is; False if there is none left."""
        if self._limit is None:
            return True
        self._taken = self._taken or self._quota.take(self._scope, self._limit)
        return self._taken

    def give_back(self) -> None:
        """The request has not used a new key."""
        if self._taken:
            self._taken = self._quota.give_back(self._scope)
