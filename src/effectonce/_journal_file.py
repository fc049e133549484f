"""The file of a client's journal: SQLite, where each word is one transaction, synced before it counts.

A killed process or a power cut leaves no half of a word, and any number of processes and threads may share the file.
Each use opens it: nothing is shared between threads or survives a fork.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from .errors import StoreMismatch, StoreUnavailable

BUSY_SECONDS = 20.0
"""How long to wait for other processes. Each holds the file for a few milliseconds."""


class JournalFile:
    """A file of its own at ``path``, made with ``schema`` if it is not there, and known by ``application``."""

    application: int
    """Marks the file as ours, in SQLite's own place for that."""
    schema: str

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()  # a process may change its directory
        with self.opened() as file:  # what is wrong with the file is better known before the first request
            file.execute("SELECT count(*) FROM requests")

    @contextmanager
    def opened(self) -> Iterator[sqlite3.Connection]:
        """The file, to read."""
        try:
            with closing(sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)) as file:
                file.execute("PRAGMA synchronous = EXTRA")
                if file.execute("PRAGMA application_id").fetchone()[0] != self.application:
                    self._make(file)
                yield file
        except sqlite3.Error as error:
            if "not a database" in str(error) or "malformed" in str(error) or "no such" in str(error):
                raise StoreMismatch(f"{self.path} is no journal: {error}. Name another file.") from error
            raise StoreUnavailable(
                f"The journal {self.path} did not take a word: {error}. Without it nothing is sent."
            ) from error

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """The file, to write one word."""
        with self.opened() as file:
            file.execute("BEGIN IMMEDIATE")
            yield file  # an error closes the file, and that rolls back
            file.execute("COMMIT")

    def _make(self, file: sqlite3.Connection) -> None:
        """Make the tables in a new file, unless another process was first."""
        file.execute("BEGIN IMMEDIATE")
        mark = file.execute("PRAGMA application_id").fetchone()[0]
        empty = not file.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if mark != self.application and not (empty and mark == 0):
            raise StoreMismatch(f"{self.path} belongs to another program. Name another file.")
        if empty:
            for statement in self.schema.split(";"):
                file.execute(statement)
            file.execute(f"PRAGMA application_id = {self.application}")
        file.execute("COMMIT")
