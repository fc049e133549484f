"""What a relay asks of the database: eight verbs, one file for each engine.

A relay has connections of its own, never the application's. The verbs block; a relay on an event loop calls them on a
thread of its own. Every write-back carries the token under which rows were leased, and touches no other rows.
"""

from __future__ import annotations

import select
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from ..errors import UsageError
from ..stores._urls import shown
from ._events import DeadEvent, Event
from ._table import DEFAULT, checked

SCHEMES = {
    **dict.fromkeys(("postgresql", "postgres", "postgresql+asyncpg"), "_postgres:PostgresOutbox"),
    **dict.fromkeys(("mysql", "mariadb"), "_mysql:MySQLOutbox"),
    "sqlite": "_sqlite:SQLiteOutbox",
}


@dataclass
class Settlement:
    """What became of a batch: the rows that were published, the others by what happens to them next."""

    published: list[int] = field(default_factory=list)
    retried: list[tuple[int, float, str, bool]] = field(default_factory=list)
    """Row, pause in seconds, reason, and whether it was an attempt."""
    given_up: list[tuple[int, str]] = field(default_factory=list)
    """Row, reason."""
    released: list[int] = field(default_factory=list)
    """Never tried, so no attempt is counted."""

    def __len__(self) -> int:
        return len(self.published) + len(self.retried) + len(self.given_up) + len(self.released)


class Lag(NamedTuple):
    """How far the relays are behind."""

    waiting: int
    """Events that were committed and not published yet."""
    seconds: float
    """How old the oldest of them is."""
    dead: int
    """Events that were given up."""


class Bell:
    """Wakes whoever waits in ``select``, from any thread and from signal handlers."""

    def __init__(self) -> None:
        self._hears, self._rings = socket.socketpair()
        self._hears.setblocking(False)
        self._rings.setblocking(False)

    def ring(self) -> None:
        """Wake the one who waits, or the next one."""
        with suppress(OSError):  # full of rings already, or closed
            self._rings.send(b"!")

    def wait(self, seconds: float, *others: Any) -> bool:
        """Wait until it rings or one of the others has something to read; whether it was before the time was over."""
        heard, _, _ = select.select([self._hears, *others], [], [], seconds)
        with suppress(BlockingIOError):
            while self._hears in heard and self._hears.recv(4096):
                pass
        return bool(heard)

    def close(self) -> None:
        """Nobody waits any more."""
        self._hears.close()
        self._rings.close()


class Database(Protocol):
    """One relay's way to the table. StoreUnavailable when the server is away: the next call connects again."""

    def migrate(self) -> bool:
        """Make the table, or see that it is ours; whether it had to be made."""
        ...

    def ddl(self) -> str:
        """The statements that ``migrate`` executes."""
        ...

    def claim(self, limit: int, lease: float, token: int) -> list[Event]:
        """Lease the next events, in order."""
        ...

    def settle(self, token: int, settlement: Settlement, *, blocks: bool, keeps: bool) -> int:
        """Write back what became of leased events; how many of them were still ours."""
        ...

    def wait(self, seconds: float, bell: Bell) -> bool:
        """Sleep until there may be something to do, at most so long; whether there was a sign of it."""
        ...

    def lag(self) -> Lag:
        """How far behind the relays are."""
        ...

    def dead(self, limit: int) -> list[DeadEvent]:
        """The oldest of the events that were given up."""
        ...

    def replay(self, id: str | None) -> int:
        """Have one that was given up published after all, or all of them; how many there were."""
        ...

    def forget(self, id: str) -> int:
        """Delete one that was given up; whether it was there."""
        ...

    def purge(self, age: float, limit: int) -> int:
        """Delete some events that were published so long ago; how many."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def open_database(url: str, table: str = DEFAULT) -> Database:
    """The database that a URL names."""
    scheme = str(url).partition("://")[0]
    if scheme not in SCHEMES:
        raise UsageError(
            f"{shown(str(url))!r} can't hold an outbox. Give the URL of the database that the application writes to: "
            "postgresql://, mysql://, mariadb:// or sqlite:///."
        )
    module, _, name = SCHEMES[scheme].partition(":")
    made: Database = getattr(import_module(f".{module}", __package__), name)(url, checked(table))
    return made


def reason_of(error: BaseException, longest: int = 1000) -> str:
    """An error in one line, short enough for a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:longest].replace("\0", "")
