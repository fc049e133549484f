"""What the SQL forms share: names that are quoted, numbers that are checked, one body for both colours."""

from __future__ import annotations

import re
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar, get_args

from .._blocking import run
from ..errors import ColourMismatch, UsageError
from ..stores._named import statements
from ..transactions import Dialect, Result, adapt
from ..transactions.base import is_missing_table
from ._rules import HIGHEST

T = TypeVar("T")

# Letters, digits, underscores, and what people quote names for: blanks and hyphens. Quotes, percent signs, dollars and
# question marks are left out: some driver takes each of them for something else.
_NAME = re.compile(r"[^\W\d][\w -]{0,62}")

SQL: Final = {
    dialect: statements("common.sql", __file__) | statements(f"{dialect}.sql", __file__)
    for dialect in get_args(Dialect)
}
"""Our own statements, by dialect and name."""


def schema(dialect: Dialect) -> list[str]:
    """The statements that make our three tables, for your migrations. They may be run again."""
    found = SQL[check_dialect(dialect)]
    return [found[name] for name in ("create_updates", "create_positions", "create_parked")]


def check_dialect(dialect: str) -> str:
    """A dialect of SQL that is known here."""
    if dialect in SQL:
        return dialect
    raise UsageError(f"dialect={shown(dialect)} is not known. Say one of {', '.join(SQL)}.")


class Quoting:
    """How a dialect of SQL writes names."""

    def __init__(self, dialect: str) -> None:
        self.dialect = check_dialect(dialect)
        self._mark = "`" if dialect == "mysql" else '"'

    def quote(self, name: str) -> str:
        """A name that ``check_name`` has passed."""
        return f"{self._mark}{name}{self._mark}"

    def table(self, parts: Iterable[str]) -> str:
        """A table's name, with its schema."""
        return ".".join(map(self.quote, parts))


class Line(Quoting):
    """A user's connection, and what its database wants to be told differently."""

    def __init__(self, connection: Any) -> None:
        self._adapter = adapt(connection)
        super().__init__(self._adapter.dialect)
        # Within a transaction MySQL reads what was there when it began, while its writes see what is there.
        self.latest = " FOR UPDATE" if self.dialect == "mysql" else ""

    def blocking(self, work: Coroutine[Any, Any, T], instead: str) -> T:
        """Run the body of a blocking method."""
        self._check(work, False, f"This connection belongs to an event loop. Write `await ….{instead}(…)`.")
        return run(work)

    async def awaiting(self, work: Coroutine[Any, Any, T], instead: str) -> T:
        """Await the body of an async method."""
        self._check(work, True, f"This connection would block the event loop. Write `….{instead}(…)`.")
        return await work

    def _check(self, work: Coroutine[Any, Any, T], awaits: bool, advice: str) -> None:
        try:
            if self._adapter.awaits is not awaits:
                raise ColourMismatch(advice)
            self._adapter.check()
        except BaseException:
            work.close()
            raise

    async def change(self, statement: str, values: Sequence[Any]) -> int:
        """How many rows a statement changed."""
        return (await self._adapter.execute(statement, values)).changed

    async def rows(self, statement: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The rows that a statement gives."""
        return (await self._adapter.execute(statement, values)).rows

    async def ours(self, name: str, values: Sequence[Any], *, latest: bool = False) -> Result:
        """One of our own statements, by name; ``latest``: reading what was committed last, also within a snapshot."""
        statement = SQL[self.dialect][name].format(latest=self.latest if latest else "")
        try:
            return await self._adapter.execute(statement, values)
        except Exception as error:
            if not is_missing_table(error):
                raise
            raise UsageError(
                "The tables of effectonce.versions are not in this database. Make them: `effectonce migrate --versions"
                f" URL`, or a migration with the statements of effectonce.versions.schema({self.dialect!r})."
            ) from error

    def text(self, value: str) -> str | bytes:
        """A text for a column of ours, where every letter counts: on MySQL these are of bytes."""
        return value.encode() if self.dialect == "mysql" else value


class Marks(list[Any]):
    """The values of a statement in the making; each is called by its number."""

    def mark(self, value: Any) -> str:
        """Take a value, and give what stands for it."""
        self.append(value)
        return f"${len(self)}"

    def each(self, values: Mapping[str, Any], quoting: Quoting, joint: str) -> str:
        """``"column" = $1`` for each, with something in between."""
        return joint.join(f"{quoting.quote(name)} = {self.mark(value)}" for name, value in values.items())


def plain(value: Any) -> str:
    """A text that was read, from a column of text or of bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def check_name(what: str, name: object) -> str:
    """The name of a table or column, if it can be one."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    raise UsageError(
        f"{what}={shown(name)} is not a name. Give it as it stands in the database: a letter or underscore, then"
        " letters, digits, _, - or blanks, 63 at most; upper and lower case count."
    )


def check_table(name: object) -> tuple[str, ...]:
    """``table`` or ``schema.table``, in its parts."""
    parts = name.split(".", 1) if isinstance(name, str) else [name]
    return tuple(check_name("table", part) for part in parts)


def check_version(what: str, version: object, least: int = 0) -> int:
    """A version is a whole number that a column of 64 bits holds, with one to follow it."""
    if isinstance(version, int) and not isinstance(version, bool) and least <= version < HIGHEST:
        return version
    raise UsageError(f"{what}={shown(version)} is not a version. Versions are whole numbers from {least}.")


def check_text(what: str, text: object) -> str:
    """A name in data: of an entity, a consumer, an update."""
    if isinstance(text, str) and text and text == text.strip() and len(text) <= 255 and text.isprintable():
        return text
    raise UsageError(
        f"{what}={shown(text)} can't be a name. Give a str of 1 to 255 printable characters, without blanks around it."
    )


def shown(value: object) -> str:
    """A value in a message, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}…{text[-15:]}"
