"""The keys of requests that a restarted program sends again.

A program that dies between sending a request and hearing the answer does not know what became of it. If the request
has a name, its key is in the journal before its first byte is sent: started again, the program names the same
request, the journal gives the same key, and the server gives the first answer or lets it run for the first time.

The journal is a SQLite file. Each word in it is one transaction, synced before it counts, so that a killed process or
a power cut leaves no half of one, and any number of processes and threads may share it. The bodies of requests are not
in it, only a fingerprint of them.

A key is worth what the server remembers of it. After ``window`` the server may have forgotten, and the same key would
run a second time, so the journal refuses the name instead: a person looks, and says ``forget``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

from .. import keys
from .._durations import Duration, seconds
from .._journal_file import JournalFile
from ..errors import InDoubt, KeyReused, LateArrival, UsageError

SCHEMA = """
    CREATE TABLE requests (
        name TEXT PRIMARY KEY, key TEXT NOT NULL, request TEXT NOT NULL, fingerprint BLOB NOT NULL,
        started REAL NOT NULL, done REAL
    ) WITHOUT ROWID;
    CREATE INDEX requests_by_end ON requests (done);
"""


class Entry(NamedTuple):
    """A named request: its key, its method and place, and when it was begun and answered (seconds since 1970)."""

    name: str
    key: str
    request: str
    started: float
    done: float | None = None


class Journal(JournalFile):
    """Remembers the keys of named requests in a file.

    path    a file of its own; it is made if it is not there
    window  how long the server remembers a key, which is its ``keep``: say no more than that
    keep    how long a name that was answered is remembered; one that was not is kept until it is
    clock   the wall clock
    """

    application, schema = 0x65314A31, SCHEMA

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        window: Duration = "24h",
        keep: Duration = "30d",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.window, self.keep = seconds(window, "window"), seconds(keep, "keep")
        self._clock = clock
        if self.keep < self.window:
            raise UsageError(
                f"keep={keep!r} is less than window={window!r}: a name would be forgotten too soon."
            )
        super().__init__(path)

    def begin(self, name: str, request: str, fingerprint: bytes, key: str) -> Entry:
        """What the name stands for: ``key``, if it is new, and else the key it had before. Durable on return."""
        keys.check_id(name)
        now = self._clock()
        with self.writing() as file:
            known = file.execute("SELECT fingerprint, * FROM requests WHERE name = ?", (name,)).fetchone()
            if known is None:
                file.execute("DELETE FROM requests WHERE done < ?", (now - self.keep,))
                file.execute(
                    "INSERT INTO requests VALUES (?, ?, ?, ?, ?, NULL)",
                    (name, key, request, fingerprint, now),
                )
                return Entry(name, key, request, now)
        entry = _entry(known[1:])
        if known[0] != fingerprint:
            raise KeyReused(
                f"The name {name!r} stands for another request in {self.path.name}: {entry.request}, with another "
                "body or place. Give each request a name of its own; forget(name) ends the old one.",
                key=entry.key,
            )
        return self._in_time(entry, now)

    def done(self, name: str) -> None:
        """The request was answered: it is not in doubt any more. Its key stays, for whoever asks again."""
        with self.writing() as file:
            file.execute(
                "UPDATE requests SET done = ? WHERE name = ? AND done IS NULL", (self._clock(), name)
            )

    def in_doubt(self) -> list[Entry]:
        """Requests without an answer, oldest first. One that another process is sending just now is among them."""
        with self.opened() as file:
            return [
                _entry(row)
                for row in file.execute("SELECT * FROM requests WHERE done IS NULL ORDER BY started")
            ]

    def get(self, name: str) -> Entry | None:
        """What is known of a name."""
        with self.opened() as file:
            row = file.execute("SELECT * FROM requests WHERE name = ?", (name,)).fetchone()
            return None if row is None else _entry(row)

    def forget(self, name: str) -> bool:
        """Let the name stand for a new request, with a new key. False if it was not known."""
        with self.writing() as file:
            return file.execute("DELETE FROM requests WHERE name = ?", (name,)).rowcount > 0

    def _in_time(self, entry: Entry, now: float) -> Entry:
        if now - entry.started <= self.window:
            return entry
        advice = "If it shall be sent as a new request, say forget(name)."
        if entry.done is None:
            raise InDoubt(
                f"{entry.name!r} was sent and never answered, longer ago than the server remembers. Find out what "
                f"became of it. {advice}",
                key=entry.key,
            )
        raise LateArrival(
            f"{entry.name!r} was answered before, and the server may not remember it. {advice}", key=entry.key
        )


def _entry(row: tuple[str, str, str, bytes, float, float | None]) -> Entry:
    name, key, request, _, started, done = row
    return Entry(name, key, request, started, done)
