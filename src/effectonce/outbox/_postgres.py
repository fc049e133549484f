"""The outbox on PostgreSQL, through psycopg. How rows are leased in order is told in ``sql/postgres.sql``."""

from __future__ import annotations

from contextlib import suppress
from operator import itemgetter
from typing import Any
from urllib.parse import unquote_plus

from ..errors import MissingExtra, StoreMismatch, StoreUnavailable
from ..stores._urls import shown
from ._database import Bell, Lag, Settlement
from ._events import DeadEvent, Event, event_of
from ._table import check_ours, named

try:
    import psycopg
except ImportError as error:
    raise MissingExtra("The outbox on PostgreSQL needs psycopg: pip install effectonce[postgres]") from error
from ..stores._postgres_wire import parameters_of

ALREADY_THERE = (
    psycopg.errors.DuplicateTable,
    psycopg.errors.DuplicateObject,
    psycopg.errors.UniqueViolation,
)
CONNECT_SECONDS = 10
OF_THE_STORE = {"table", "schema", "pool", "timeout", "create", "prepare", "durability"}
"""Options of the store's URL that libpq would not understand; one URL may serve both."""


class PostgresOutbox:
    """One relay's connection."""

    def __init__(self, url: str, table: str) -> None:
        self._shown, self._name = shown(url), table
        self._url = _for_libpq(url)
        self._sql = named("postgresql", table)
        self._connection: Any = None
        self._was_notified = False

    def migrate(self) -> bool:
        """Make the table, or see that it is ours."""
        if self._is_there():
            return False
        try:
            self._do(self._sql["schema"])
        except ALREADY_THERE:  # somebody else made it at the same moment
            return not self._is_there()
        return True

    def ddl(self) -> str:
        """The statements that ``migrate`` executes."""
        return self._sql["schema"] + "\n"

    def _is_there(self) -> bool:
        found = self._do(self._sql["whose"], (f'"{self._name}"',))
        if found:
            check_ours(found[0][0], self._name, self._shown)
        return bool(found)

    def claim(self, limit: int, lease: float, token: int) -> list[Event]:
        """Lease the next events, in order."""
        values = {"limit": limit, "lease": lease, "token": token}
        rows = self._do(self._sql["claim"], values)
        rows.sort(key=itemgetter(0))
        return [event_of(row) for row in rows]

    def settle(self, token: int, settlement: Settlement, *, blocks: bool, keeps: bool) -> int:
        """Write back what became of leased events, in one round trip."""
        calls: list[tuple[str, dict[str, Any]]] = []
        if settlement.published:
            calls.append(("publish" if keeps else "delete", {"seqs": _array(settlement.published)}))
        if settlement.released:
            calls.append(("release", {"seqs": _array(settlement.released)}))
        if settlement.retried:
            columns = (list(column) for column in zip(*settlement.retried, strict=True))
            names = ("seqs", "pauses", "reasons", "counts")
            calls.append(("retry", dict(zip(names, columns, strict=True))))
        if settlement.given_up:
            seqs, reasons = (list(column) for column in zip(*settlement.given_up, strict=True))
            calls.append(("give_up", {"seqs": seqs, "reasons": reasons, "state": 2 if blocks else 3}))
        if len(calls) == 1:
            (name, values) = calls[0]
            return self._count(self._sql[name], {**values, "token": token})
        with self._speaking() as connection, connection.transaction(), connection.pipeline():
            cursors = [
                connection.execute(self._sql[name], {**values, "token": token}) for name, values in calls
            ]
        return sum(cursor.rowcount for cursor in cursors)

    def wait(self, seconds: float, bell: Bell) -> bool:
        """Sleep until somebody notifies, the bell rings or the time is over."""
        with self._speaking() as connection:
            connection.execute(self._sql["sleep"], (seconds + 1,))
            # A notification that came with an answer is in nobody's socket any more.
            woken = self._was_notified or bell.wait(seconds, connection.fileno())
            if woken:
                connection.execute(self._sql["wake"])
            self._was_notified = False
            return woken

    def _notified(self, _: psycopg.Notify) -> None:
        self._was_notified = True

    def lag(self) -> Lag:
        """How far behind the relays are."""
        return Lag(*self._do(self._sql["lag"])[0])

    def dead(self, limit: int) -> list[DeadEvent]:
        """The oldest of the events that were given up."""
        rows = self._do(self._sql["dead"], (limit,))
        return [DeadEvent(event_of(row[:8]), row[8] or "", row[9]) for row in rows]

    def replay(self, id: str | None) -> int:
        """Have one that was given up published after all, or all of them."""
        return self._count(self._sql["replay"], {"id": id})

    def forget(self, id: str) -> int:
        """Delete one that was given up."""
        return self._count(self._sql["forget"], {"id": id})

    def purge(self, age: float, limit: int) -> int:
        """Delete some events that were published so long ago."""
        return self._count(self._sql["purge"], {"age": age, "limit": limit})

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _do(self, statement: str, values: Any = None) -> list[Any]:
        with self._speaking() as connection:
            cursor = connection.cursor(binary=values is not None)
            cursor.execute(statement, values, prepare=values is not None)
            return cursor.fetchall() if cursor.description else []

    def _count(self, statement: str, values: dict[str, Any]) -> int:
        with self._speaking() as connection:
            changed: int = connection.execute(statement, values).rowcount
            return changed

    def _speaking(self) -> _Speaking:
        return _Speaking(self)

    def connected(self) -> Any:
        """The connection, made when there is none."""
        if self._connection is None or self._connection.closed:
            connection: Any = psycopg.connect(
                self._url, autocommit=True, connect_timeout=CONNECT_SECONDS, prepare_threshold=0
            )
            self._connection = connection
            connection.execute(self._sql["session"])
            connection.execute(self._sql["listen"])
            connection.add_notify_handler(self._notified)
        return self._connection

    def translated(self, error: psycopg.Error) -> Exception:
        """What to say of a driver's error."""
        why = " ".join(str(error).split()).rstrip(".")
        if isinstance(error, psycopg.errors.UndefinedTable):
            return StoreMismatch(
                f"There is no outbox {self._name} in {self._shown}. Run `effectonce migrate --outbox URL` first."
            )
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            return StoreMismatch(
                f"PostgreSQL refused the relay at {self._shown}: {why}. Grant its role SELECT, UPDATE and DELETE on "
                f"{self._name}, and UPDATE on its sequence."
            )
        if isinstance(error, psycopg.OperationalError):
            return StoreUnavailable(f"{self._shown} gave no answer: {why}. Check that the server runs.")
        return error


class _Speaking:
    """Gives the connection, and says in our own words what goes wrong on it."""

    def __init__(self, outbox: PostgresOutbox) -> None:
        self._outbox = outbox

    def __enter__(self) -> Any:
        try:
            return self._outbox.connected()
        except psycopg.Error as error:
            self._outbox.close()
            raise self._outbox.translated(error) from error

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is None:
            return
        if not isinstance(error, psycopg.Error) or isinstance(error, psycopg.OperationalError):
            with suppress(psycopg.Error):
                self._outbox.close()  # Ctrl-C too: answers may be on their way to it
        if isinstance(error, psycopg.Error) and not isinstance(error, ALREADY_THERE):
            raise self._outbox.translated(error) from error


def _array(numbers: list[int]) -> str:
    """Numbers as PostgreSQL writes an array. psycopg looks at each of them for ten times as long."""
    return f"{{{','.join(map(str, numbers))}}}"


def _for_libpq(url: str) -> str:
    """A URL without what is ours, which libpq understands: else it is told here, and without its password."""
    plain, _, query = url.partition("?")
    pairs = [pair for pair in query.split("&") if unquote_plus(pair.partition("=")[0]) not in OF_THE_STORE]
    scheme, _, place = plain.partition("://")
    cleaned = f"{scheme.partition('+')[0]}://{place}?{'&'.join(pairs)}".rstrip("?")
    parameters_of(cleaned)
    return cleaned
