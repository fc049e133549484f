"""One connection per process that listens for the ends of records, while somebody in the process waits for one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any

import psycopg
from psycopg import sql

from ..errors import EffectOnceError
from ._postgres_sql import Lost
from ._postgres_wire import Connect, let_go

LINGER_SECONDS, LOOK_SECONDS = 5.0, 0.25
"""How long the connection stays after the last one who waited, and how often it is looked at."""

Wake = Callable[[bool], None]


class Ears:
    """Tells who waits for a record that something happened to it; or False, when nothing can be heard any more."""

    def __init__(self, connect: Connect, channel: str) -> None:
        self._connect, self._channel = connect, channel
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        """Entered by its lock: an exception of a signal handler could leave the condition itself locked."""
        self._waiting: dict[str, list[Wake]] = {}
        self._thread: threading.Thread | None = None
        self._connection: psycopg.Connection[Any] | None = None
        self.open = False

    @contextmanager
    def listening(self, name: str, wake: Wake) -> Iterator[None]:
        """Have ``wake`` called, on another thread, when something happens to the record of this name."""
        with self._lock:
            self._waiting.setdefault(name, []).append(wake)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._listen, name="effectonce-ears", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._waiting[name].remove(wake)
                if not self._waiting[name]:
                    del self._waiting[name]

    def hears(self, seconds: float) -> bool:
        """Whether listening has begun; waits until that is known."""
        if not self.open:
            with self._lock:
                self._changed.wait_for(lambda: self.open or self._thread is None, seconds)
        return self.open

    def close(self) -> None:
        """Listen no more."""
        self._closed = True

    def forget(self) -> None:
        """Let go of the parent's connection in a forked child."""
        if self._connection is not None:
            let_go(self._connection)
        self._start()

    def _listen(self) -> None:
        with suppress(psycopg.Error, Lost, EffectOnceError), self._connect() as self._connection:
            if _is_lent(self._connection):
                self.close()
            else:
                self._hear(self._connection)
        with self._lock:
            self.open, self._thread, self._connection = False, None, None
            self._changed.notify_all()
            deaf = [wake for wakes in self._waiting.values() for wake in wakes]
        for wake in deaf:
            wake(False)

    def _hear(self, connection: psycopg.Connection[Any]) -> None:
        connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
        with self._lock:
            self.open = True
            self._changed.notify_all()
        wanted_at = monotonic()
        while not self._closed and monotonic() - wanted_at < LINGER_SECONDS:
            for note in connection.notifies(timeout=LOOK_SECONDS):
                with self._lock:
                    wakes = list(self._waiting.get(note.payload, ()))
                for wake in wakes:
                    wake(True)
            if self._waiting:
                wanted_at = monotonic()


def _is_lent(connection: psycopg.Connection[Any]) -> bool:
    """Whether a pooler is in between: it names a process of its own, and may tell somebody else what we listen for."""
    return connection.execute("SELECT pg_backend_pid()").fetchone() != (connection.info.backend_pid,)
