"""A client's numbers in a file: they survive kill -9, and tell what is in doubt.

A number is in the journal before its request is sent, and its answer before the number is acknowledged. So a restarted
program finds every request that may have happened without an answer, sends it again under its old number, and gets the
first answer or lets it run for the first time. The file is SQLite's: each word in it is one transaction, synced
before it counts. It belongs to one client; a second process that goes on with it resumes the session, and fences the
first one.
"""

from __future__ import annotations

import sqlite3
from typing import Any, Final, NamedTuple

from .. import codec
from .._journal_file import JournalFile
from ..errors import Fenced, UsageError
from ._request import Opened

ROWS: Final = "SELECT number, name, asked, payload, answer, done FROM requests"

SCHEMA: Final = """
    CREATE TABLE session (
        one INTEGER PRIMARY KEY CHECK (one = 1), client TEXT NOT NULL, epoch INTEGER NOT NULL, lease REAL NOT NULL,
        window INTEGER NOT NULL, next INTEGER NOT NULL
    );
    CREATE TABLE requests (
        number INTEGER UNIQUE, name TEXT UNIQUE, asked BLOB NOT NULL, payload BLOB, answer BLOB,
        done INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX requests_in_doubt ON requests (number) WHERE done = 0;
"""


class Entry(NamedTuple):
    """A request in the journal. ``payload`` is what was asked, ``answer`` what came of it, if it is ``done``.

    The number of one that a session before this one has answered is 0.
    """

    number: int
    name: str | None
    asked: bytes
    payload: Any = None
    answer: Any = None
    done: bool = False


class Journal(JournalFile):
    """The numbers of one client's session, in the file ``path``, which is made if it is not there."""

    application, schema = 0x65315331, SCHEMA

    @property
    def client(self) -> str | None:
        """The client id to resume; None if there is none yet."""
        with self.opened() as file:
            row = file.execute("SELECT client FROM session").fetchone()
        return row[0] if row else None

    def begin_session(self, opened: Opened) -> int:
        """Write down a session that was opened or resumed; gives the next number."""
        with self.writing() as file:
            row = file.execute("SELECT client, next FROM session").fetchone()
            if row is not None and row[0] != opened.client:
                raise UsageError(
                    f"{self.path.name} belongs to another session. Resume that one; if it has expired, settle what "
                    "is in doubt and say forget()."
                )
            following = max(row[1] if row else 1, opened.acked + 1)
            file.execute(
                "INSERT OR REPLACE INTO session VALUES (1, ?, ?, ?, ?, ?)",
                (opened.client, opened.epoch, opened.lease, opened.window, following),
            )
        return int(following)

    def begin(self, epoch: int, number: int, name: str | None, asked: bytes, payload: Any) -> None:
        """Write down a request that is about to be sent. Durable on return."""
        data = None if payload is None else codec.encode(payload)
        with self.writing() as file:
            self._check(file, epoch)
            # Who does not know all numbers that are waited for would acknowledge those of others.
            counted = "UPDATE session SET next = next + 1 WHERE next = ?"
            if not file.execute(counted, (number,)).rowcount:
                raise Fenced(
                    f"Another ClientSession goes on with the session of {self.path.name}, or this one was interrupted "
                    "while it wrote. Let threads share one; resume the session to go on with what is in the journal."
                )
            file.execute(
                "INSERT INTO requests (number, name, asked, payload) VALUES (?, ?, ?, ?)",
                (number, name, asked, data),
            )

    def settle(
        self, number: int, answer: Any = None, given_up: bool = False, epoch: int | None = None
    ) -> None:
        """It is answered, or given up. A named one that is answered stays, so that it is never sent again.

        For people, when its session is over: without an ``epoch`` nobody asks who says so.
        """
        data = None if answer is None else codec.encode(answer)
        with self.writing() as file:
            if epoch is not None:
                self._check(file, epoch)
            if not given_up:
                file.execute(
                    "UPDATE requests SET done = 1, answer = ?, payload = NULL WHERE number = ?",
                    (data, number),
                )
            file.execute("DELETE FROM requests WHERE number = ? AND (name IS NULL OR done = 0)", (number,))

    def in_doubt(self) -> list[Entry]:
        """Requests without an answer, in the order of their numbers."""
        with self.opened() as file:
            return [_entry(row) for row in file.execute(f"{ROWS} WHERE done = 0 ORDER BY number")]

    def get(self, name: str) -> Entry | None:
        """What is known of a named request."""
        with self.opened() as file:
            row = file.execute(f"{ROWS} WHERE name = ?", (name,)).fetchone()
        return None if row is None else _entry(row)

    def forget(self, name: str | None = None) -> None:
        """Forget a named request that was answered; without a name the session, when nothing is in doubt any more."""
        with self.writing() as file:
            if name is not None:
                file.execute("DELETE FROM requests WHERE name = ? AND done = 1", (name,))
                return
            doubts = file.execute("SELECT count(*) FROM requests WHERE done = 0").fetchone()[0]
            if doubts:
                raise UsageError(
                    f"{doubts} requests in {self.path.name} are in doubt. Find out what became of each in in_doubt(), "
                    "and say settle(entry.number, answer), or settle(entry.number, given_up=True) if it never happened."
                )
            file.execute("UPDATE requests SET number = NULL")  # the next session begins to count anew
            file.execute("DELETE FROM session")

    def _check(self, file: sqlite3.Connection, epoch: int) -> None:
        """The journal is its session's last epoch's."""
        row = file.execute("SELECT epoch FROM session").fetchone()
        if row is None or row[0] != epoch:
            raise Fenced(f"Another process has resumed the session of {self.path.name}, and goes on with it.")


def _entry(row: tuple[Any, ...]) -> Entry:
    number, name, asked, payload, answer, done = row
    return Entry(number or 0, name, asked, _read(payload), _read(answer), bool(done))


def _read(data: bytes | None) -> Any:
    return None if data is None else codec.decode(data, Any)
