"""Optimistic locking for rows of your own: a write that says which version it read, and is refused if that is gone.

Two people open the same record, both change it, both save. Without a guard the second save undoes the first in
silence. With one, each row carries a version; a write names the version it was based on, and the database takes it only
if the row is still there. That is one statement, so nothing comes between the question and the answer.

A retry is not a rival. Where the table has a column for it (``by=``), each update has a name, and one that comes
again finds its own name in the row and is told that it was made already. Equal values would not do as a sign: two
withdrawals of the same amount from the same balance look alike and are two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import StaleVersion, UsageError
from ._rules import Row, Write, decide_write
from ._sql import Line, Marks, check_name, check_table, check_text, check_version, plain, shown

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
    by         the column with the name of the last update, if there is one; then repeats are known
    """

    def __init__(
        self, table: str, *, id: str | tuple[str, ...] = "id", version: str = "version", by: str | None = None
    ) -> None:
        self.table = check_table(table)
        self.id = tuple(
            check_name("id", column) for column in (id if isinstance(id, tuple | list) else (id,))
        )
        self.version = check_name("version", version)
        self.by = None if by is None else check_name("by", by)
        own = [column.lower() for column in (*self.id, self.version, self.by) if column]
        if not self.id or len(set(own)) < len(own):
            raise UsageError("id, version and by have to be columns of their own, and id at least one.")
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
        values = (id,) if len(self.id) == 1 else id
        if not isinstance(values, tuple | list) or len(values) != len(self.id) or None in values:
            raise UsageError(f"id={shown(id)} names no row. Give a value for each of {', '.join(self.id)}.")
        return tuple(values)

    def check_by(self, by: object) -> str | None:
        """The name of an update, where rows have room for it."""
        if self.by is None and by is not None:
            raise UsageError("This guard has no column for by=. Name it: VersionGuard(…, by='updated_by').")
        if self.by is not None and by is None:
            raise UsageError(
                f"This guard keeps the name of each update in {self.by!r}, so an update needs one: by='request-17',"
                " or by=current().key_for('withdraw') inside a handler."
            )
        return None if by is None else check_text("by", by)


class GuardedTable:
    """``guard.on(connection)``: the writes that a guard allows. Methods with ``a`` are for async connections."""

    def __init__(self, guard: VersionGuard, line: Line) -> None:
        self._guard, self._line = guard, line

    def update(self, id: Any, *, expected: int, set: Mapping[str, Any], by: str | None = None) -> Change:
        """Set columns of the row if it is at ``expected``, which makes it one higher. Else ``StaleVersion``.

        The same update by the same name is made once; a repeat says ``replayed`` and changes nothing. That is so as
        long as nobody else has written the row since: then a repeat is ``StaleVersion``, and still never written twice.
        """
        return self._line.blocking(self._update(id, expected, set, by), instead="aupdate")

    async def aupdate(
        self, id: Any, *, expected: int, set: Mapping[str, Any], by: str | None = None
    ) -> Change:
        """``update`` for async connections."""
        return await self._line.awaiting(self._update(id, expected, set, by), instead="update")

    async def _update(self, id: Any, expected: int, set: Mapping[str, Any], by: str | None) -> Change:
        guard, ids = self._guard, self._guard.check_id(id)
        check_version("expected", expected)
        values, name = guard.check_values(set), guard.check_by(by)
        for _ in range(ROUNDS):
            if await self._write(ids, expected, values, name):
                return Change(expected + 1)
            row = await self._read(ids)
            verdict = decide_write(row, expected, name)
            if verdict is Write.REPEATED:
                assert row is not None and row.version is not None
                return Change(row.version, replayed=True)
            if verdict is Write.STALE:
                raise self._stale(id, expected, row)
            # It is where it should be, now. Somebody brought it there between the two statements: once more.
        raise UsageError(
            f"The row {shown(id)} of {'.'.join(guard.table)} is at version {expected} and yet can't be written: does a"
            " trigger or a rule of the table turn updates away?"
        )

    async def _write(
        self, ids: Sequence[Any], expected: int, values: Mapping[str, Any], by: str | None
    ) -> bool:
        guard, line, marks = self._guard, self._line, Marks()
        setting = {**values, guard.version: expected + 1, **({guard.by: by} if guard.by else {})}
        where = {**dict(zip(guard.id, ids, strict=True)), guard.version: expected}
        changes, condition = marks.each(setting, line, ", "), marks.each(where, line, " AND ")
        if guard.by is not None and by is not None:
            differs = f"{line.exact(guard.by)} <> {marks.mark(line.text(by))}"
            condition += f" AND ({line.quote(guard.by)} IS NULL OR {differs})"
        statement = f"UPDATE {line.table(guard.table)} SET {changes} WHERE {condition}"  # noqa: S608
        written = await line.change(statement, marks)
        if written > 1:
            raise UsageError(
                f"{written} rows had the id {shown(tuple(ids))} and were written: id= has to be unique. Roll back."
            )
        return written == 1

    async def _read(self, ids: Sequence[Any]) -> Row | None:
        guard, line, marks = self._guard, self._line, Marks()
        columns = ", ".join(line.quote(column) for column in (guard.version, guard.by) if column)
        where = marks.each(dict(zip(guard.id, ids, strict=True)), line, " AND ")
        statement = f"SELECT {columns} FROM {line.table(guard.table)} WHERE {where}{line.latest}"  # noqa: S608
        rows = await line.rows(statement, marks)
        if not rows:
            return None
        version, by = (*rows[0], None)[:2]
        return Row(None if version is None else int(version), None if by is None else plain(by))

    def _stale(self, id: object, expected: int, row: Row | None) -> StaleVersion:
        name = f"{shown(id)} of {'.'.join(self._guard.table)}"
        if row is None:
            what = f"There is no row {name}: it was deleted, or never was. Nothing was written."
            return StaleVersion(what, expected=expected)
        if row.version is None:
            what = f"The row {name} has no version. Make the column NOT NULL DEFAULT 1. Nothing was written."
            return StaleVersion(what, expected=expected)
        what = (
            f"The row {name} is at version {row.version}, not {expected}: it was changed since you read it. Nothing was"
            " written. Read it again, decide again, and write with the version you find."
        )
        return StaleVersion(what, expected=expected, actual=row.version)
