"""Optimistic locking for rows of your own: a write that says which version it read, and is refused if that is gone.

Two people open the same record, both change it, both save. Without a guard the second save undoes the first in
silence. With one, each row carries a version; a write names the version it was based on, and the database takes it only
if the row is still there. That is one statement, so nothing comes between the question and the answer.

A retry is not a rival. An update that is given a name (``by=``) is remembered in the same transaction; when it comes
again it is told that it was made, however much has happened to the row since. Equal values would not do as a sign: two
withdrawals of the same amount from the same balance look alike and are two.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from .. import keys
from ..errors import StaleVersion, UsageError
from ._rules import may_write
from ._sql import Line, Marks, check_name, check_table, check_text, check_version, shown

ROUNDS = 5
"""How often a row may change between the write that missed it and the look at it, before that is somebody's fault."""


class Change(NamedTuple):
    """What became of an update: the version that the row has by now, and whether the update had been made before."""

    version: int
    replayed: bool = False


class VersionGuard:
    """A table whose rows carry a version.

    table      its name, with its schema if need be: "accounts", "bank.accounts"
    id         the column that tells rows apart, or several: "id", ("tenant", "number")
    version    the column with the version: a whole number, not null
    """

    def __init__(self, table: str, *, id: str | tuple[str, ...] = "id", version: str = "version") -> None:
        self.table = check_table(table)
        self._several = isinstance(id, tuple | list)
        self.id = tuple(
            check_name("id", column) for column in (id if isinstance(id, tuple | list) else (id,))
        )
        self.version = check_name("version", version)
        own = [column.lower() for column in (*self.id, self.version)]
        if not self.id or len(set(own)) < len(own):
            raise UsageError("id and version have to be columns of their own, and id at least one.")
        self._own = frozenset(own)

    def on(self, connection: Any) -> GuardedTable:
        """The guard over a connection or session of yours; it takes part in whatever transaction is open there."""
        return GuardedTable(self, Line(connection))

    def check_values(self, set: object) -> dict[str, Any]:
        """The columns that an update sets."""
        if not isinstance(set, Mapping) or not set:
            raise UsageError(
                f"set={shown(set)} changes nothing. Give a mapping from columns to their new values."
            )
        values = {check_name("set", column): value for column, value in set.items()}
        if taken := [column for column in values if column.lower() in self._own]:
            raise UsageError(
                f"set= names {taken[0]!r}, which is the guard's own. Leave it out; the guard sets it."
            )
        return values

    def check_id(self, id: object) -> tuple[Any, ...]:
        """The values of the id's columns."""
        values = id if self._several else (id,)
        if not isinstance(values, tuple | list) or len(values) != len(self.id) or None in values:
            raise UsageError(f"id={shown(id)} names no row. Give a value for each of {', '.join(self.id)}.")
        return tuple(values)

    def name_of(self, ids: tuple[Any, ...], by: object) -> str | None:
        """What an update of this name to this row is remembered by."""
        return (
            None
            if by is None
            else keys.content_id([self.table, ids, check_text("by", by)], "effectonce.versions")
        )


class GuardedTable:
    """``guard.on(connection)``: the writes that a guard allows. Methods with ``a`` are for async connections."""

    def __init__(self, guard: VersionGuard, line: Line) -> None:
        self._guard, self._line = guard, line

    def update(self, id: Any, *, expected: int, set: Mapping[str, Any], by: str | None = None) -> Change:
        """Set columns of the row if it is at ``expected``, which makes it one higher. Else ``StaleVersion``.

        With a name, as of the request that it is made for, the same update to the same row is made once; a repeat
        says ``replayed`` and changes nothing, whichever version it expects. (``schema`` makes the table for that.)
        """
        return self._line.blocking(self._update(id, expected, set, by), instead="aupdate")

    async def aupdate(
        self, id: Any, *, expected: int, set: Mapping[str, Any], by: str | None = None
    ) -> Change:
        """``update`` for async connections."""
        return await self._line.awaiting(self._update(id, expected, set, by), instead="update")

    async def _update(self, id: Any, expected: int, set: Mapping[str, Any], by: str | None) -> Change:
        check_version("expected", expected)
        ids, values = self._guard.check_id(id), self._guard.check_values(set)
        name = self._guard.name_of(ids, by)
        # The name comes first: a duplicate at the same moment waits there, and then finds it.
        if name is not None and not (await self._line.ours("remember", [name, expected + 1])).changed:
            ((made,),) = (await self._line.ours("made", [name], latest=True)).rows
            return Change(int(made), replayed=True)
        try:
            return await self._made(id, ids, expected, values)
        except Exception:
            # It may be committed all the same, after a constraint that failed for example; and then was not made.
            with suppress(Exception):  # PostgreSQL hears nothing more, and will not commit
                if name is not None:
                    await self._line.ours("forget", [name])
            raise

    async def _made(self, id: Any, ids: tuple[Any, ...], expected: int, values: Mapping[str, Any]) -> Change:
        for _ in range(ROUNDS):
            if await self._written(ids, expected, values):
                return Change(expected + 1)
            actual = await self._version(ids)
            if not may_write(actual, expected):
                raise self._stale(id, expected, actual)
            # It is where it should be, now. Somebody brought it there between the two statements: once more.
        raise UsageError(
            f"The row {shown(id)} of {'.'.join(self._guard.table)} is at version {expected} and yet can't be written:"
            " does a trigger or a rule of the table turn updates away? Roll back."
        )

    async def _written(self, ids: tuple[Any, ...], expected: int, values: Mapping[str, Any]) -> bool:
        guard, line, marks = self._guard, self._line, Marks()
        changes = marks.each({**values, guard.version: expected + 1}, line, ", ")
        where = marks.each({**dict(zip(guard.id, ids, strict=True)), guard.version: expected}, line, " AND ")
        written = await line.change(f"UPDATE {line.table(guard.table)} SET {changes} WHERE {where}", marks)  # noqa: S608
        if written > 1:
            raise UsageError(
                f"{written} rows had the id {shown(ids)} and were written: id= has to be unique. Roll back."
            )
        return written == 1

    async def _version(self, ids: tuple[Any, ...]) -> int | None:
        guard, line, marks = self._guard, self._line, Marks()
        where = marks.each(dict(zip(guard.id, ids, strict=True)), line, " AND ")
        asked = (
            f"SELECT {line.quote(guard.version)} FROM {line.table(guard.table)} WHERE {where}{line.latest}"  # noqa: S608
        )
        rows = await line.rows(asked, marks)
        if not rows or rows[0][0] is None:
            return None
        try:
            return int(rows[0][0])
        except ValueError:
            raise UsageError(
                f"The column {guard.version!r} holds {shown(rows[0][0])}, which is no version."
            ) from None

    def _stale(self, id: object, expected: int, actual: int | None) -> StaleVersion:
        name = f"{shown(id)} of {'.'.join(self._guard.table)}"
        if actual is None:
            what = (
                f"There is no row {name} with a version: it was deleted, never was, or its version is NULL."
            )
        else:
            what = (
                f"The row {name} is at version {actual}, not {expected}: it was changed since you read it. Read it"
                " again, decide again, and write with the version you find."
            )
        return StaleVersion(f"{what} Nothing was written.", expected=expected, actual=actual)
