"""What the drivers of users' connections have in common: statements in one style, savepoints, and engines' errors.

An adapter speaks over a connection that its user has, inside a transaction that its user owns. It never opens a
connection, and it commits or rolls back (further than to its own savepoints) only where a call is a transaction by its
user's own wish. Every method is a coroutine; those of blocking drivers never suspend, so that one body serves both
colours.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, ClassVar, Final, Literal, NamedTuple

from ..errors import UsageError

Dialect = Literal["sqlite", "postgresql", "mysql"]
Values = Sequence[Any]
Statement = tuple[str, Values]
Style = Literal["numbered", "qmark", "format"]

_NUMBERS = count(1)
_PARAMETER = re.compile(r"\$(\d+)")


class Result(NamedTuple):
    """What a statement came to: the rows it gave, and how many rows it changed."""

    rows: list[tuple[Any, ...]]
    changed: int


class Adapter(ABC):
    """A user's connection in one shape.

    Statements are in the engine's own SQL, with ``$1``, ``$2`` … for values, in any order and as often as needed, on
    every engine; nothing else in them may look so. Values are None, int, float, str, bytes, and on PostgreSQL lists of
    these. Rows are tuples of the same, whatever row factory the user has chosen.
    """

    dialect: Dialect
    awaits: bool = False
    """Whether its coroutines suspend: then they belong to callers on an event loop."""
    style: ClassVar[Style] = "numbered"
    pipelines: bool = False
    """Whether ``execute_all`` takes one round trip."""
    is_mariadb: bool = False
    server_version: int = 0
    """Of PostgreSQL, where the driver knows it."""
    how_to_begin: ClassVar[str]
    """What to write to be in a transaction, for the error of who is not."""
    may_begin: ClassVar[bool] = False
    """Whether it begins and commits transactions where it is asked to: a framework's have to be its own."""

    @abstractmethod
    def in_transaction(self) -> bool:
        """Whether what is executed now is part of a transaction; one that the driver begins by itself counts."""

    def check(self) -> None:
        """Raise unless a transaction is there for everything to be part of."""
        if not self.in_transaction():
            raise self.commits_alone()

    def commits_alone(self) -> UsageError:
        """What to say to who is in no transaction."""
        return UsageError(
            "This connection commits every statement by itself, so that nothing could be atomic. Begin a "
            f"transaction first: {self.how_to_begin}"
        )

    # A transaction that begins and ends with a call

    def check_idle(self) -> None:
        """Raise unless a transaction may begin that holds nothing of anybody else's."""
        if not self.may_begin:
            raise UsageError(
                "commit=True is for the connections of drivers. Here transactions are begun and committed by what is "
                f"above the driver: {self.how_to_begin} Then call without commit=True."
            )
        if self.is_closed():
            raise UsageError("This connection is closed. Nothing was claimed. Take another one.")
        if not self.is_idle():
            raise UsageError(
                "This connection is in a transaction already, and commit=True would commit what is in it. Commit or "
                "roll back first, or call without commit=True: then it is yours to commit."
            )

    def is_idle(self) -> bool:
        """Whether no transaction is going on; one that the driver would begin by itself is not."""
        raise NotImplementedError

    def is_closed(self) -> bool:
        """Whether the driver knows that there is no connection any more."""
        return False

    async def tidy(self) -> None:  # noqa: B027 - most have nothing to do
        """Have the driver know that its transaction is over, if that was ended behind its back."""

    def opening(self) -> Any:
        """What begins a transaction in one round trip with the statements after it; None: only ``begin`` can."""
        return None

    async def begin(self) -> None:
        """Begin a transaction, on a connection that is idle."""
        raise NotImplementedError

    async def commit(self) -> None:
        """Commit it."""
        raise NotImplementedError

    async def roll_back(self) -> None:
        """Undo all of it."""
        raise NotImplementedError

    @abstractmethod
    async def execute(self, sql: str, values: Values = ()) -> Result:
        """Have one statement done. The driver's own errors go through as they are: ``code_of`` reads them."""

    async def execute_all(self, statements: Sequence[Statement]) -> list[Result]:
        """Have several done, in order and up to the first that fails; in one round trip where the driver can."""
        return [await self.execute(sql, values) for sql, values in statements]

    def may_talk(self) -> bool:
        """Whether ``talk`` is to be had now."""
        return False

    async def talk(self, calls: Sequence[Any]) -> list[Result]:
        """Have statements of a store done in one round trip, at less than ``execute_all`` costs."""
        raise NotImplementedError

    # Savepoints. A name is good for one savepoint.

    def new_name(self) -> str:
        """A name for a savepoint that no other has."""
        return f"effectonce_{next(_NUMBERS)}"

    async def savepoint(self, name: str) -> None:
        """Mark this moment."""
        await self.execute(f"SAVEPOINT {name}")

    async def release(self, name: str) -> None:
        """Forget the mark; ``SavepointGone`` if somebody has ended the transaction meanwhile."""
        with GONE_OR_RAISED:
            await self.execute(f"RELEASE SAVEPOINT {name}")

    async def let_go(self, name: str) -> None:  # noqa: B027 - most have nothing to do
        """Forget a mark that may have been made or not, with what came after it. One that only the engine knows of
        does no harm.
        """

    async def hang_up(self) -> None:
        """See to it that nothing of the transaction can be committed: close the connection, where that can be done."""
        await self.execute("ROLLBACK")

    async def move_on(self, name: str, to: str) -> None:
        """Forget a mark and make the next, in one round trip where the driver can. Raises what ``release`` does."""
        await self.release(name)
        await self.savepoint(to)

    async def roll_back_to(self, name: str) -> None:
        """Undo what came after the mark, and forget it."""
        with GONE_OR_RAISED:
            await self.execute_all(((f"ROLLBACK TO SAVEPOINT {name}", ()), (f"RELEASE SAVEPOINT {name}", ())))


@lru_cache(maxsize=512)
def _translated(sql: str, style: Style) -> tuple[str, tuple[int, ...] | None]:
    """A statement in a driver's style, and which value goes where; None: as they are given."""
    if style == "numbered":
        return sql, None
    if style == "qmark":
        return _PARAMETER.sub(r"?\1", sql), None
    places = tuple(int(number) - 1 for number in _PARAMETER.findall(sql))
    return _PARAMETER.sub("%s", sql.replace("%", "%%")), places


def translated(sql: str, values: Values, style: Style) -> tuple[str, tuple[Any, ...] | None]:
    """A statement and its values as a driver wants them; None: no values, and nothing to be filled in."""
    if not values:
        return sql, None
    text, places = _translated(sql, style)
    return text, tuple(values if places is None else [values[place] for place in places])


def plain(rows: Iterable[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Rows as tuples, and bytes as bytes."""
    return [
        tuple([bytes(value) if isinstance(value, memoryview | bytearray) else value for value in row])
        for row in rows
    ]


class SavepointGone(Exception):
    """A savepoint is not there any more: its transaction has been ended by somebody."""


# Errors of drivers, read without importing one of them

SQLITE_BUSY: Final = 5
LOCK_TIMED_OUT: Final = {"55P03", 1205, 3572}
"""Somebody else has kept a lock for longer than one may wait."""
RETRYABLE: Final = {"40001", "40P01", "55P03", 1205, 1213, 3572, SQLITE_BUSY}
"""The transaction did nothing wrong: all of it may be run again."""
NO_SUCH_TABLE: Final = {"42P01", "42883", 1146}
NO_SUCH_SAVEPOINT: Final = {"3B001", "25P01", 1305}
"""Nor is there one where there is no transaction."""
_MYSQL_DRIVERS: Final = {"pymysql", "asyncmy", "MySQLdb", "mysql"}
_LOST_NUMBERS: Final = {0, 2003, 2006, 2013, 2055}
_LOSING_DRIVERS: Final = {"psycopg", "psycopg2", "asyncpg", *_MYSQL_DRIVERS}
_LOST_NAMES: Final = {"OperationalError", "InterfaceError"}
"""What a driver calls it when there is no word of a server in it."""
ELSEWHERE: Final = "_effectonce_elsewhere"
"""An attribute of errors that are known not to be about the connection of the transaction."""


def code_of(error: BaseException) -> str | int | None:
    """The engine's word for an error: PostgreSQL's SQLSTATE, MySQL's number, SQLite's primary code; None: it has none.

    What SQLAlchemy and Django wrap is unwrapped.
    """
    for each in and_causes(error):
        number = each.args[0] if each.args else None
        if _package(each) in _MYSQL_DRIVERS and type(number) is int:
            return number
        state = getattr(each, "sqlstate", None) or getattr(each, "pgcode", None)
        if isinstance(state, str) and state:
            return state
        code = getattr(each, "sqlite_errorcode", None)
        if isinstance(code, int):
            return code & 0xFF
    return None


def is_missing_table(error: BaseException) -> bool:
    """Whether an engine has not found a table, or what belongs to it."""
    return code_of(error) in NO_SUCH_TABLE or "no such table" in str(error)


def is_retryable(error: BaseException) -> bool:
    """Whether an engine's error asks for nothing but to run the whole transaction again."""
    return code_of(error) in RETRYABLE


def is_lost(error: BaseException) -> bool:
    """Whether a connection broke, so that nobody knows what became of its transaction."""
    if any(getattr(each, ELSEWHERE, False) for each in and_causes(error)):
        return False
    code = code_of(error)
    if isinstance(code, str):
        return code.startswith(("08", "57P0"))
    if code is not None:
        return code in _LOST_NUMBERS
    return any(
        isinstance(each, ConnectionError | EOFError)
        or getattr(each, "connection_invalidated", False)
        or (_package(each) in _LOSING_DRIVERS and type(each).__name__ in _LOST_NAMES)
        for each in and_causes(error)
    )


def answered_after(error: BaseException) -> None:
    """The connection has answered after this error: if something broke it was another one, as to a service."""
    if is_lost(error):
        setattr(error, ELSEWHERE, True)


class GoneOrRaised:
    """Tells an error about a savepoint that is gone from every other."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.tell(error)

    def tell(self, error: Exception) -> None:
        """Raise ``SavepointGone`` if that is what an error says."""
        if code_of(error) in NO_SUCH_SAVEPOINT or "no such savepoint" in str(error):
            raise SavepointGone(str(error)) from error


GONE_OR_RAISED: Final = GoneOrRaised()


def _package(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]


def and_causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from, also where SQLAlchemy keeps it; each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        inner = getattr(error, "orig", None)
        error = inner if isinstance(inner, BaseException) else error.__cause__
