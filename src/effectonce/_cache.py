"""Finished records that this process holds, so that it can answer without asking the store."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ._fork import tell_of_forks
from ._records import Record

MOST_BYTES = 64 << 20
"""Of results, however many records may be held."""


class Cache:
    """A bounded dictionary of finished records. None is held longer than the store keeps it."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._records: dict[str, tuple[float, Record]] = {}
        self._bytes = self._most = 0
        self._lock = threading.RLock()  # a signal's handler may call what it has interrupted
        tell_of_forks(self)

    def get(self, key: str) -> Record | None:
        """The record of a key, if it is held and still counts."""
        found = self._records.get(key)
        return None if found is None or found[0] <= self._monotonic() else found[1]

    def put(self, record: Record, until: float, most: int) -> None:
        """Hold a record until a local time. Of more than ``most``, or too many bytes, the oldest go.

        Policies share the cache: the largest number that one of them gave counts, or each would drop what others hold.
        """
        if self.get(record.key) is not None or _size(record) > MOST_BYTES:
            return
        records = self._records
        with self._lock:
            self._most = max(self._most, most)
            self._drop(record.key)
            records[record.key] = (until, record)
            self._bytes += _size(record)
            while len(records) > self._most or self._bytes > MOST_BYTES:
                self._drop(next(iter(records)))

    def _drop(self, key: str) -> None:
        found = self._records.pop(key, None)
        if found is not None:
            self._bytes -= _size(found[1])

    def before_fork(self) -> None:
        """Let nobody be in the middle of a change."""
        self._lock.acquire()

    def after_fork(self, *, in_child: bool) -> None:
        """Go on, each process for itself."""
        self._lock.release()


def _size(record: Record) -> int:
    return len(record.result or b"")
