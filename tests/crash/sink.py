"""The outside world: sinks in a SQLite file of their own. This one checks fences and dedupes on the derived key."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

SCHEMA = (
    "CREATE TABLE IF NOT EXISTS effects (key TEXT PRIMARY KEY, fence INTEGER, effect TEXT, accepted INTEGER)"
)


class Stale(Exception):
    """A fence older than one the sink has seen: the caller was overtaken."""


class SinkFile:
    """What every sink has: a file that all processes write to, and a lock between threads."""

    def __init__(self, path: Path, schema: str) -> None:
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.executescript(schema)

    def close(self) -> None:
        self._connection.close()


class Sink(SinkFile):
    """Accepts an effect once. A repeat with a fence as new is told the first effect; an older fence is refused."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, SCHEMA)

    def apply(self, key: str, fence: int, effect: str) -> str:
        """Make the effect happen, unless it has; what happened is the answer."""
        with self._lock:
            return self._apply(key, fence, effect)

    def _apply(self, key: str, fence: int, effect: str) -> str:
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        try:
            known = execute("SELECT fence, effect FROM effects WHERE key = ?", (key,)).fetchone()
            if known is None:
                execute("INSERT INTO effects VALUES (?, ?, ?, 1)", (key, fence, effect))
            elif fence < known[0]:
                raise Stale(f"{key}: fence {fence} after {known[0]}")
            else:
                effect = known[1]
                execute("UPDATE effects SET fence = ? WHERE key = ?", (fence, key))
        except BaseException:
            execute("ROLLBACK")
            raise
        execute("COMMIT")
        return effect

    def effect(self, key: str) -> str | None:
        """What has happened under a key."""
        found = self._connection.execute("SELECT effect FROM effects WHERE key = ?", (key,)).fetchone()
        return found and str(found[0])

    def check(self) -> str:
        """SQLite's own opinion of the file."""
        return str(self._connection.execute("PRAGMA integrity_check").fetchone()[0])
