"""The last line of defence: a unique column in your own table, so that the database refuses what must not be twice.

A receiver remembers keys in its store. A store can be lost, restored from an old backup, or left out by a colleague who
calls the function directly. If the row that *is* the effect (the payment, the booking, the entry in the books) carries
the key of its effect in a unique column, the second one can't be written by anybody. It costs an index, and it
holds for as long as the row does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from ..errors import UsageError
from ..transactions.base import Dialect, and_causes
from ._sql import Line, Marks, Quoting, check_name, check_table, check_text, plain, shown

_COLUMN_TYPES: Final = {
    "sqlite": "TEXT",
    "postgresql": 'text COLLATE "C"',
    "mysql": "VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin",
}
"""Types for which texts that differ at all are different, as they are for every other store of keys."""


class UniqueEffect:
    """A table each row of which is an effect, and the column that holds the effect's key.

    table        its name, with its schema if need be
    column       the unique column; ``schema`` makes it
    constraint   the name of its unique index or constraint, if ``schema`` did not make it
    """

    def __init__(self, table: str, *, column: str = "effect_key", constraint: str | None = None) -> None:
        self.table, self.column = check_table(table), check_name("column", column)
        self.constraint = check_name("constraint", constraint or f"{self.table[-1]}_{column}_once"[:63])
        self.indexes: set[str] = set()
        """What they are called in the database, where it was asked."""

    def schema(self, dialect: Dialect) -> list[str]:
        """The statements that add the column and its unique index: for your migrations.

        Rows that are there already have no key, which a unique index allows any number of.
        """
        quoting = Quoting(dialect)
        table, column, index = (
            quoting.table(self.table),
            quoting.quote(self.column),
            quoting.quote(self.constraint),
        )
        # SQLite wants the schema before the index, the others before the table alone.
        if dialect == "sqlite":
            index, table_of_index = (
                quoting.table((*self.table[:-1], self.constraint)),
                quoting.quote(self.table[-1]),
            )
        else:
            table_of_index = table
        return [
            f"ALTER TABLE {table} ADD COLUMN {column} {_COLUMN_TYPES[dialect]}",
            f"CREATE UNIQUE INDEX {index} ON {table_of_index} ({column})",
        ]

    def on(self, connection: Any) -> EffectTable:
        """The table over a connection or session of yours; it takes part in whatever transaction is open there."""
        return EffectTable(self, Line(connection))

    def already_done(self, error: BaseException) -> bool:
        """Whether a driver's or an ORM's error says that a row with this key was there already.

        For inserts of your own. Any other error, also of another constraint, is not this one: raise it again.
        """
        return any(self._names_constraint(cause) for cause in and_causes(error))

    def _names_constraint(self, error: BaseException) -> bool:
        names = {self.constraint, f"{self.table[-1]}_{self.column}_key", self.column, *self.indexes}
        if getattr(error, "sqlstate", None) == "23505":  # PostgreSQL, by psycopg and asyncpg
            told: Any = getattr(error, "diag", error)
            name = getattr(told, "constraint_name", None)
            if name == f"{self.table[-1]}_pkey":  # … Key (column)=(value) …
                detail = getattr(told, "message_detail", None) or getattr(told, "detail", None) or ""
                return f"({self.column})=(" in detail
            return name in names
        if error.args[:1] == (1062,):  # MySQL: … for key 'table.index'; MariaDB: … for key 'index'
            key = re.search(r"'(?:([^']*)\.)?([^'.]+)'\s*$", str(error.args[-1]))
            return key is not None and key[1] in (None, self.table[-1]) and key[2] in names
        told = re.fullmatch("UNIQUE constraint failed: (.*)", str(error.args[0]) if error.args else "")
        return told is not None and told[1] in (
            f"{self.table[-1]}.{self.column}",
            f"index '{self.constraint}'",
        )


class EffectTable:
    """``effect.on(connection)``."""

    def __init__(self, effect: UniqueEffect, line: Line) -> None:
        self._effect, self._line = effect, line

    def insert(self, row: Mapping[str, Any], *, key: str) -> bool:
        """Insert the row with its key. True: it is there now. False: it was there already, and nothing was written.

        On PostgreSQL, too, the transaction goes on either way: the conflict is asked about, not run into.
        """
        return self._line.blocking(self._insert(row, key), instead="ainsert")

    async def ainsert(self, row: Mapping[str, Any], *, key: str) -> bool:
        """``insert`` for async connections."""
        return await self._line.awaiting(self._insert(row, key), instead="insert")

    async def _insert(self, row: Mapping[str, Any], key: str) -> bool:
        values = self._checked(row, key)
        if await self._inserted(values):
            return True
        line, column = self._line, self._line.quote(self._effect.column)
        asked = f"SELECT {column} FROM {line.table(self._effect.table)} WHERE {column} = $1{line.latest}"  # noqa: S608
        found = [plain(row[0]) for row in await line.rows(asked, [key])]
        if key in found:
            return False
        taken = f"takes {shown(found[0])} for the same key" if found else "did not take the row, and has none"
        raise UsageError(
            f"The column {self._effect.column!r} {taken} as {shown(key)}, so nothing was written. Its texts have to be"
            " compared exactly (see UniqueEffect.schema), and no trigger may turn rows away."
        )

    async def _inserted(self, values: Mapping[str, Any]) -> bool:
        line, marks = self._line, Marks()
        columns, places = ", ".join(map(line.quote, values)), ", ".join(map(marks.mark, values.values()))
        statement = f"INSERT INTO {line.table(self._effect.table)} ({columns}) VALUES ({places})"  # noqa: S608
        if line.dialect != "mysql":
            conflict = f" ON CONFLICT ({line.quote(self._effect.column)}) DO NOTHING"
            return await line.change(statement + conflict, marks) == 1
        # MySQL has no word for "this conflict only"; and a refused row leaves its transaction as it was.
        await self._check_index()
        try:
            return await line.change(statement, marks) == 1
        except Exception as error:
            if not self._effect.already_done(error):
                raise
            return False

    async def _check_index(self) -> None:
        """Other engines refuse to look for a conflict that can't be; MySQL would write one row after the other."""
        effect = self._effect
        if effect.indexes:
            return
        place = [*[None] * (2 - len(effect.table)), *effect.table]
        rows = (await self._line.ours("unique_index", [*place, effect.column])).rows
        effect.indexes = {plain(name) for (name,) in rows}
        if not effect.indexes:
            raise UsageError(
                f"The column {effect.column!r} of {'.'.join(effect.table)} has no unique index of its own, so it would"
                " hold nothing back. Make it in a migration: UniqueEffect.schema('mysql')."
            )

    def _checked(self, row: object, key: object) -> dict[str, Any]:
        column = self._effect.column
        if not isinstance(row, Mapping):
            raise UsageError(f"row={shown(row)} is not a row. Give a mapping from columns to values.")
        values = {check_name("row", name): value for name, value in row.items()}
        if column.lower() in map(str.lower, values):
            raise UsageError(f"The row names {column!r} itself. Give the key as key=….")
        return {**values, column: check_text("key", key)}
