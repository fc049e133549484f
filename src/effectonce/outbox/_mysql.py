"""The outbox on MySQL 8 and MariaDB 10.6 or newer, through PyMySQL. ``sql/mysql.sql`` tells how rows are leased."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import parse_qsl

from ..errors import StoreMismatch, StoreUnavailable
from ..stores._mysql_lines import Address, driver
from ..stores._urls import split
from ..stores.mysql import MySQLStore
from ._database import Bell, Lag, Settlement
from ._events import DeadEvent, Event, event_of
from ._table import check_ours, named

pymysql = driver("pymysql")
NO_SUCH_TABLE, ALREADY_THERE = 1146, 1050
TRY_AGAIN = {1205, 1213}
"""A lock that others kept for too long, a deadlock: all was rolled back."""
TIMEOUT_SECONDS = 30.0
SESSION = (
    "SET time_zone = '+00:00', innodb_lock_wait_timeout = 5 /*M!100300 , idle_transaction_timeout = 5 */"
)
"""A relay that freezes in the middle of a transaction holds up others; MariaDB can end it."""


class MySQLOutbox:
    """One relay's connection."""

    def __init__(self, url: str, table: str) -> None:
        self._address, self._name = _address(url), table
        self._sql = named("mysql", table)
        self._connection: Any = None

    def migrate(self) -> bool:
        """Make the table, or see that it is ours."""
        if self._is_there():
            return False
        try:
            self._run(self._sql["schema"])
        except pymysql.OperationalError as error:
            if error.args[0] != ALREADY_THERE:  # by somebody else, at the same moment
                raise
            return not self._is_there()
        return True

    def ddl(self) -> str:
        """The statements that ``migrate`` executes."""
        return self._sql["schema"] + "\n"

    def _is_there(self) -> bool:
        found = self._run(self._sql["whose"], (self._name,))[0]
        if found:
            check_ours(found[0][0], self._name, self._address.shown)
        return bool(found)

    def claim(self, limit: int, lease: float, token: int) -> list[Event]:
        """Lease the next events, in order."""
        with self._transaction() as run:
            ready, _ = run("ready", limit=limit)
            going = self._unstopped(run, ready)
            if going:
                until = float(going[0][8]) + lease
                run("lease", seqs=tuple(row[0] for row in going), until=until, token=token)
        return [_event(row) for row in going]

    def _unstopped(self, run: Any, ready: Sequence[Any]) -> list[Any]:
        """Rows with no earlier one of their aggregate that is not locked here too."""
        aggregates = {row[3] for row in ready if row[3] is not None}
        if not aggregates:
            return list(ready)
        locked = {row[0] for row in ready}
        stops: dict[bytes, int] = {}
        earlier, _ = run("earlier", aggregates=tuple(aggregates), last=ready[-1][0])
        for aggregate, seq in earlier:
            if seq not in locked:
                stops.setdefault(aggregate, seq)
        return [row for row in ready if row[3] is None or row[0] < stops.get(row[3], row[0] + 1)]

    def settle(self, token: int, settlement: Settlement, *, blocks: bool, keeps: bool) -> int:
        """Write back what became of leased events."""
        held = 0
        with self._transaction() as run:
            if settlement.published:
                name = "publish" if keeps else "delete"
                held += run(name, seqs=tuple(settlement.published), token=token)[1]
            if settlement.released:
                held += run("release", seqs=tuple(settlement.released), token=token)[1]
            for seq, pause, reason, counts in settlement.retried:
                held += run("retry", seq=seq, pause=pause, reason=reason, counts=counts, token=token)[1]
            for seq, reason in settlement.given_up:
                held += run("give_up", seq=seq, reason=reason, state=2 if blocks else 3, token=token)[1]
        return held

    def wait(self, seconds: float, bell: Bell) -> bool:
        """Sleep until the bell rings or the time is over: these engines tell nobody of a commit."""
        return bell.wait(seconds)

    def lag(self) -> Lag:
        """How far behind the relays are."""
        waiting, seconds, dead = self._run(self._sql["lag"])[0][0]
        return Lag(waiting, max(0.0, float(seconds)), dead)

    def dead(self, limit: int) -> list[DeadEvent]:
        """The oldest of the events that were given up."""
        rows, _ = self._run(self._sql["dead"], {"limit": limit})
        return [DeadEvent(_event(row), row[8] or "", bool(row[9])) for row in rows]

    def replay(self, id: str | None) -> int:
        """Have one that was given up published after all, or all of them."""
        return self._run(self._sql["replay"], {"id": id})[1]

    def forget(self, id: str) -> int:
        """Delete one that was given up."""
        return self._run(self._sql["forget"], {"id": id})[1]

    def purge(self, age: float, limit: int) -> int:
        """Delete some events that were published so long ago."""
        return self._run(self._sql["purge"], {"age": age, "limit": limit})[1]

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            with suppress(pymysql.Error):
                self._connection.close()
            self._connection = None

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        with self._speaking() as connection:
            self._do(self._sql["isolation"])
            connection.begin()
            try:
                yield lambda name, **values: self._do(self._sql[name], values)
                connection.commit()
            except BaseException:
                self.close()  # which rolls back
                raise

    def _run(self, statement: str, values: Any = None) -> tuple[list[Any], int]:
        with self._speaking():
            return self._do(statement, values)

    def _do(self, statement: str, values: Any = None) -> tuple[list[Any], int]:
        with self._connection.cursor() as cursor:
            changed = cursor.execute(statement, values)
            return list(cursor.fetchall()), changed

    @contextmanager
    def _speaking(self) -> Iterator[Any]:
        try:
            if self._connection is None:
                self._connection = self._connected()
            yield self._connection
        except pymysql.MySQLError as error:
            code = error.args[0] if error.args else 0
            if code == NO_SUCH_TABLE:
                raise StoreMismatch(
                    f"There is no outbox {self._name} in {self._address.shown}. Run `effectonce migrate --outbox URL` "
                    "first."
                ) from error
            if code != ALREADY_THERE and isinstance(error, pymysql.OperationalError | pymysql.InterfaceError):
                self.close()
                raise StoreUnavailable(
                    f"{self._address.shown} gave no answer: {error}. Check that the server runs."
                ) from error
            raise

    def _connected(self) -> Any:
        options = self._address.options()
        return pymysql.connect(
            **options,
            read_timeout=TIMEOUT_SECONDS,
            write_timeout=TIMEOUT_SECONDS,
            ssl_disabled=self._address.tls == "no",
            init_command=SESSION,
        )


def _event(row: Sequence[Any]) -> Event:
    seq, name, topic, key, *rest = row[:8]
    return event_of((seq, name.decode(), topic, None if key is None else key.decode(), *rest))


def _address(url: str) -> Address:
    """Where the server is: the URL is read as the store reads it."""
    store = MySQLStore.from_url(url, dict(parse_qsl(split(url).query, keep_blank_values=True)))
    try:
        return store.address
    finally:
        store.close()
