"""A pool of connections that only read: each is used by one thread at a time, and all can be closed for a fork."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_SECONDS = 10.0
"""How long a rest waits for a lent connection. One that a signal's exception took along never comes back."""


class Readers:
    """Lends connections; as many are open as were ever needed at once."""

    def __init__(self, open_connection: Callable[[], sqlite3.Connection]) -> None:
        self._open = open_connection
        self._idle: list[sqlite3.Connection] = []
        self._lent = 0
        self._lock = threading.RLock()
        self._given_back = threading.Condition(self._lock)
        """Entered by its lock: an exception of a signal handler could leave the condition itself locked."""

    @contextmanager
    def lend(self) -> Iterator[sqlite3.Connection]:
        """A connection for one thread, for a while."""
        with self._lock:
            connection = self._idle.pop() if self._idle else self._open()
            self._lent += 1
        try:
            yield connection
        finally:
            with self._lock:
                self._idle.append(connection)
                self._lent -= 1
                self._given_back.notify_all()

    def rest(self) -> None:
        """Lend no more, wait until all are back, and close them. ``resume`` ends the rest."""
        self._lock.acquire()
        self._given_back.wait_for(lambda: not self._lent, PATIENCE_SECONDS)
        while self._idle:
            self._idle.pop().close()

    def resume(self) -> None:
        """Lend again."""
        self._lock.release()
