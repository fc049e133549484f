"""A table that rotates: three slots, of which the oldest is emptied at once instead of row by row.

What is true of the slots is said and kept in ``postgres_rotating.sql``. Here is only when somebody looks: with the
traffic, a step at a time, and never in a user's transaction. Nothing depends on it but how much room is taken.
"""

from __future__ import annotations

import time
from typing import Final

from ..errors import EffectOnceError, StoreMismatch
from ._postgres_sql import Call, Refusal, Row, Wires
from ._postgres_table import LOCKED, TRY_AGAIN, Table

SLOTS: Final = 3
PAGES_AT_ONCE: Final = 256
"""How much of a slot one step goes through: some 8,000 records, in a few milliseconds."""
FEW: Final = 64
"""How many records of those pages may move on. Where there are more, the slot waits until they have expired."""
LOOKS: Final = 32
"""How often in a period somebody looks whether a slot that had to wait still has to."""
LONGEST_PAUSE: Final = 60.0
LATE: Final = 2.0
"""After so many periods in one slot the hand deletes what has expired, as it does where nothing rotates."""
TAKEN: Final = "23505"
"""A record was to move to the current slot, and expired on its way: its key has another one there by now."""
NOT_ONE_ROW: Final = {"23514", "21000", "P0002", "P0003"}
"""Nothing says which slot is current, or more than one row does."""
CANCELED: Final = "57014"
"""A statement took too long."""


class RotatingTable(Table):
    """The table of a store with ``rotate=``."""

    rotates = True
    try_again = TRY_AGAIN | {TAKEN}

    def __init__(
        self, url: str, name: str, seconds: float, create: bool, lasting: bool, period: float
    ) -> None:
        super().__init__(url, name, seconds, create, lasting)
        self._period, self._pause = period, min(period / LOOKS, LONGEST_PAUSE)
        self._turn = self.sql.one["turn"]
        self._slot = 0
        self._is_late = self._has_looked = False
        self._look_at = 0.0

    async def make_ready(self, wires: Wires, *, create: bool | None = None) -> bool:
        """Make sure that the table is there and ours, and that this role may do all that it has to."""
        made = await super().make_ready(wires, create=create)
        self.ready = False
        (forbidden,) = await wires.run([Call(self.sql.one["forbidden"])])
        if isinstance(forbidden, Refusal):
            raise self.translated(forbidden)
        if forbidden:
            grants = "; ".join(f"GRANT {rights} ON {name} TO this role" for rights, name in forbidden)
            raise StoreMismatch(
                f"This role may not do all that a table that rotates needs, {self.name} in {self.shown}. Have the "
                f"owner run: {grants}."
            )
        (rows,) = await wires.run([Call(self.sql.one["rows"])])
        if isinstance(rows, Refusal):
            raise self.translated(rows)
        if list(map(tuple, rows)) != [(1, 1)]:
            raise StoreMismatch(self._not_one_row())
        self.ready = True
        return made

    def translated(self, refusal: Refusal) -> EffectOnceError:
        """An error of the tree that says what to do, also where nothing says which slot is current."""
        if refusal.code in NOT_ONE_ROW:
            return StoreMismatch(self._not_one_row())
        return super().translated(refusal)

    def _not_one_row(self) -> str:
        ring, sweep = f'{self.name[:-1]}_ring"', f'{self.name[:-1]}_sweep"'
        anew = f"INSERT INTO {ring} VALUES (0, 0, 0); INSERT INTO {sweep} VALUES (0, 0, 0, '0')"  # noqa: S608 — not sent
        return (
            f"{ring} and {sweep} in {self.shown}, which say where {self.name} is in its rotation, must hold one row "
            "each: were they emptied, or restored twice or not at all? Nothing was changed. While nobody uses the "
            f"table, have their owner run: TRUNCATE {ring}, {sweep}; {anew}."
        )

    def chore(self, rows: int) -> Call | None:
        """A step of the rotation when it is time for one. If that is late, the hand has its turns between them."""
        self._has_looked = time.monotonic() >= self._look_at and not (self._is_late and self._has_looked)
        if self._has_looked:
            self._look_at = time.monotonic() + self._pause
            return self.turn()
        return self.pass_over(rows) if self._is_late else None

    def chores(self, rows: int) -> list[Call]:
        """Who asks for a purge gets both."""
        return [self.turn(), self.pass_over(rows)]

    def turn(self) -> Call:
        """A step of the rotation."""
        return Call(self._turn, (self._period, PAGES_AT_ONCE, FEW, self._pause))

    def can_wait(self, call: Call, refusal: Refusal) -> bool:
        """A step that somebody is in the way of is made later."""
        return call.statement is self._turn and refusal.code in {LOCKED, CANCELED, *self.try_again}

    def pass_over(self, rows: int) -> Call:
        """A purge of the pages before the hand, in the slot that it is in."""
        statement, values = super().pass_over(rows)
        return Call(statement, (*values, self._slot))

    def passed(self, call: Call, row: Row) -> int:
        """See what a step has come to, or move the hand on, to the next slot at a slot's end."""
        if call.statement is self._turn:
            goes_on, age = row
            self._is_late = not 0 <= age <= LATE * self._period  # below zero if the clock was set back
            if goes_on:
                self._look_at = 0.0
            return 0
        gone = super().passed(Call(call.statement, call.values[:3]), row)
        if self._hand == 0:
            self._slot = (self._slot + 1) % SLOTS
        return gone
