"""The outbox in a SQLite file, the application's own. Several relays may share it, but they take turns.

``PRAGMA data_version`` tells for next to nothing whether anybody else has committed, so new events are found soon.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..errors import StoreMismatch, StoreUnavailable, UsageError
from ..stores._urls import shown
from ._database import Bell, Lag, Settlement
from ._events import DeadEvent, Event, event_of
from ._table import named

LOOK_SECONDS = 0.05
"""How often to ask whether anybody has committed."""
BUSY_SECONDS = 5.0


class SQLiteOutbox:
    """One relay's connection."""

    def __init__(self, url: str, table: str) -> None:
        path = url.removeprefix("sqlite://").partition("?")[0]
        if not path.startswith("/") or path in ("/", "/:memory:"):
            raise UsageError(f"{shown(url)!r} names no file. Write sqlite:///app.db.")
        self._path, self._name = path[1:], table
        self._sql = named("sqlite", table)
        self._connection: sqlite3.Connection | None = None
        self._version = 0

    def migrate(self) -> bool:
        """Make the table, or see that it is ours; and the file, if need be."""
        with self._transaction(makes=True) as connection:
            found = {name for (name,) in connection.execute(self._sql["columns"], (self._name,))}
            if not found:
                for statement in self._sql["schema"].split(";\n\n"):
                    connection.execute(statement)
            elif not {"seq", "due_at", "token", "aggregate", "payload"} <= found:
                raise StoreMismatch(
                    f"The table {self._name} in {self._path} belongs to another program. Nothing was changed. Choose "
                    "another name with table=."
                )
            return not found

    def ddl(self) -> str:
        """The statements that ``migrate`` executes."""
        return self._sql["schema"] + "\n"

    def claim(self, limit: int, lease: float, token: int) -> list[Event]:
        """Lease the next events, in order."""
        values = {"limit": limit, "lease": lease, "token": token, "now": time.time()}
        with self._transaction() as connection:
            rows = connection.execute(self._sql["claim"], values).fetchall()
        rows.sort(key=itemgetter(0))
        return [event_of(row) for row in rows]

    def settle(self, token: int, settlement: Settlement, *, blocks: bool, keeps: bool) -> int:
        """Write back what became of leased events."""
        same: dict[str, Any] = {"token": token, "now": time.time(), "state": 2 if blocks else 3}
        calls: dict[str, list[dict[str, Any]]] = {
            "publish" if keeps else "delete": [{"seq": seq} for seq in settlement.published],
            "release": [{"seq": seq} for seq in settlement.released],
            "retry": [
                {"seq": seq, "pause": pause, "reason": why, "counts": counts}
                for seq, pause, why, counts in settlement.retried
            ],
            "give_up": [{"seq": seq, "reason": why} for seq, why in settlement.given_up],
        }
        with self._transaction() as connection:
            return sum(
                connection.executemany(self._sql[name], [same | values for values in rows]).rowcount
                for name, rows in calls.items()
                if rows
            )

    def wait(self, seconds: float, bell: Bell) -> bool:
        """Sleep until somebody else has committed, the bell rings or the time is over."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if bell.wait(min(left, LOOK_SECONDS)) or self._has_changed():
                return True
        return False

    def _has_changed(self) -> bool:
        with self._speaking() as connection:
            before = self._version
            (self._version,) = connection.execute("PRAGMA data_version").fetchone()
        return self._version != before

    def lag(self) -> Lag:
        """How far behind the relays are."""
        return Lag(*self._rows("lag")[0])

    def dead(self, limit: int) -> list[DeadEvent]:
        """The oldest of the events that were given up."""
        rows = self._rows("dead", limit=limit)
        return [DeadEvent(event_of(row[:8]), row[8] or "", bool(row[9])) for row in rows]

    def replay(self, id: str | None) -> int:
        """Have one that was given up published after all, or all of them."""
        return self._changed("replay", id=id)

    def forget(self, id: str) -> int:
        """Delete one that was given up."""
        return self._changed("forget", id=id)

    def purge(self, age: float, limit: int) -> int:
        """Delete some events that were published so long ago."""
        return self._changed("purge", age=age, limit=limit)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _rows(self, name: str, **values: Any) -> list[Any]:
        with self._speaking() as connection:
            return connection.execute(self._sql[name], {"now": time.time(), **values}).fetchall()

    def _changed(self, name: str, **values: Any) -> int:
        with self._transaction() as connection:
            return connection.execute(self._sql[name], {"now": time.time(), **values}).rowcount

    @contextmanager
    def _transaction(self, *, makes: bool = False) -> Iterator[sqlite3.Connection]:
        """Writing from the start: one that began by reading could find itself outdated."""
        with self._speaking(makes=makes) as connection:
            connection.execute("BEGIN IMMEDIATE")
            with connection:  # commits, or rolls back
                yield connection

    @contextmanager
    def _speaking(self, *, makes: bool = False) -> Iterator[sqlite3.Connection]:
        try:
            if self._connection is None:
                if not (makes or Path(self._path).exists()):  # SQLite would make an empty one
                    raise StoreMismatch(
                        f"There is no file {Path(self._path).absolute()}, so there is no outbox. Give the path of the "
                        "application's database: sqlite:///app.db is relative, sqlite:////var/app.db is not. Run "
                        "`effectonce migrate --outbox URL` to make it."
                    )
                self._connection = sqlite3.connect(
                    self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
                )
            yield self._connection
        except sqlite3.Error as error:
            if "no such table" in str(error):
                raise StoreMismatch(
                    f"There is no outbox {self._name} in {self._path}. Run `effectonce migrate --outbox URL` first."
                ) from error
            if isinstance(error, sqlite3.OperationalError):
                raise StoreUnavailable(f"{self._path} can't be used now: {error}. Try again.") from error
            raise
