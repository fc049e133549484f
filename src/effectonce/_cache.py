"""Finished records that this process holds, so that it can answer without asking the store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ._records import Record


class Cache:
    """A bounded dictionary of finished records. None is held longer than the store keeps it."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._records: dict[str, tuple[float, Record]] = {}

    def get(self, key: str) -> Record | None:
        """The record of a key, if it is held and still counts."""
        found = self._records.get(key)
        return None if found is None or found[0] <= self._monotonic() else found[1]

    def put(self, record: Record, until: float, most: int) -> None:
        """Hold a record until a local time; of more than ``most`` the oldest go."""
        records = self._records
        if self.get(record.key) is None:
            records.pop(record.key, None)
            records[record.key] = (until, record)
            while len(records) > most:
                with suppress(RuntimeError, StopIteration):  # another thread was here between the two
                    records.pop(next(iter(records)), None)
