"""The table: made when it is missing, looked at before it is used, and walked through by a hand."""

from __future__ import annotations

import random
import re
from math import ceil
from typing import Final

from ..errors import EffectOnceError, StoreError, StoreMismatch, StoreUnavailable, UsageError
from ._postgres_sql import Call, Closed, Lost, Refusal, Row, Statement, Statements, Wires
from ._steps import Kept
from ._urls import shown

SCHEMA: Final = 1
ROTATING_SCHEMA: Final = 2
"""Another number, so that an effectonce that knows of no rotation leaves the table alone."""
ENCODINGS: Final = ("UTF8", "SQL_ASCII")
"""Of databases that keep every character of a key."""
ROWS_IN_A_PAGE: Final = 32
"""About as many."""

ALREADY_THERE: Final = {"42P07", "42710", "23505", "XX000"}
"""Somebody else made the table at the same moment, or (by "tuple concurrently updated") a function of its."""
MOST_TRIES: Final = 8
"""Or something that is left of another one is in the way."""
TRY_AGAIN: Final = {"40001", "40P01"}
"""Serialization failure and deadlock: the statement did nothing and may be sent again."""
LOCKED: Final = "55P03"
"""A transaction that is still open has the row."""
ITS_OWN: Final = ("22", "55")
"""Classes of refusals that are about one row: a value that does not fit, or a record that somebody keeps locked."""
POOLED: Final = (
    "A pooler such as PgBouncer is in between, which lends its sessions: add prepare=no to the URL, so that nothing is "
    "asked of a session that the next one would not know."
)
ADVICE: Final = {
    "42P05": POOLED,
    "42501": "Grant this role SELECT, INSERT, UPDATE and DELETE on the table, and USAGE on its schema.",
    "42P01": "It was there before: find out who dropped it. Without it nobody knows what has happened already.",
}


class Table:
    """What both colours share: the table's name and statements, whether it is ready, and where the hand is."""

    rotates = False
    try_again = TRY_AGAIN

    def __init__(self, url: str, name: str, seconds: float, create: bool, lasting: bool) -> None:
        self.shown, self.name, self.seconds = shown(url), name, seconds
        self.sql = Statements(name, rotating=self.rotates)
        self.quick = Statements(name, patient=False, rotating=self.rotates)
        self.ready = False
        self.home: str | None = None
        """The schema that it is in, as SQL has it, once that is known."""
        self.kept = Kept()
        self.expects_known = False
        """Whether the last claim in a user's transaction was for a known key: the next one probably is, too."""
        self._create, self._lasting = create, lasting
        self._hand = random.getrandbits(31)  # a process of few claims must not always purge the same pages

    async def make_ready(self, wires: Wires, *, create: bool | None = None) -> bool:
        """Make sure that the table is there and ours; whether it had to be made."""
        made = done = False
        tries = iter(range(MOST_TRIES))
        may_make = self._create if create is None else create
        while True:
            (answer,) = await wires.run([Call(self.sql.one["whose"], (self.name,))])
            if isinstance(answer, Refusal):
                raise self.translated(answer)
            if answer:
                *found, is_meant, self.home = answer[0]
                self._check(*found)
                if is_meant:
                    self.ready = True
                    return made
            if done or not may_make:
                raise self._unfit(is_there=bool(answer))
            patience = (
                f"SELECT set_config('lock_timeout', '{int(500 * self.seconds)}', true)"  # others make it, too
            )
            texts = (patience, *(self.sql.functions if answer else self.sql.schema))
            answers = await wires.run([Call(Statement("", text)) for text in texts], together=True)
            refusal = next((answer for answer in answers if isinstance(answer, Refusal)), None)
            done = refusal is None
            made = done and not answer
            if refusal is not None and (refusal.code not in ALREADY_THERE or next(tries, None) is None):
                raise self._unfit(refusal, is_there=bool(answer))

    def _unfit(self, refusal: Refusal | None = None, *, is_there: bool) -> StoreMismatch:
        """What to say of a table that is not there, or was given another name, and can't be made or mended."""
        if is_there:
            why = f", and could not be made anew: {refusal}" if refusal else ""
            return StoreMismatch(
                f"The table {self.name} in {self.shown}, or its schema, was renamed: the function beside it is missing "
                f"or writes to another table{why}. Nothing was changed. Run `effectonce migrate URL` as the role that "
                "made it."
            )
        if refusal:
            return StoreMismatch(
                f"There is no table {self.name} in {self.shown}, and it could not be created: {refusal}. Have a "
                "role that may do so run `effectonce migrate URL`, or the statements that `effectonce migrate "
                "--print URL` prints."
            )
        return StoreMismatch(
            f"There is no table {self.name} in {self.shown}. Run `effectonce migrate URL` as a role that may "
            "create it, or leave out create=no."
        )

    def check_kind(self, comment: str | None) -> None:
        """Raise if a table with this comment is not one that this store understands."""
        ours = re.match(r"effectonce schema (\d+)(, rotating)?\b", comment or "")
        if ours is None:
            raise StoreMismatch(
                f"The table {self.name} in {self.shown} belongs to another program. Nothing was changed. Choose "
                "another name with ?table=."
            )
        if int(ours[1]) > (ROTATING_SCHEMA if ours[2] else SCHEMA):
            raise StoreMismatch(
                f"The table {self.name} has schema {ours[1]}, this effectonce knows {SCHEMA}. Nothing was changed. Use "
                "the effectonce that made it, or newer."
            )
        if self.rotates and not ours[2]:
            raise StoreMismatch(
                f"The table {self.name} in {self.shown} was made without rotate=. Nothing was changed. Leave rotate= "
                "out, or choose another name with ?table= once what this one remembers is not needed any more."
            )
        if ours[2] and not self.rotates:
            raise StoreMismatch(
                f"The table {self.name} in {self.shown} was made to rotate. Nothing was changed. Say how often, as in "
                "rotate=6h, or choose another name with ?table=."
            )

    def check_rights(self, begins_only: bool) -> None:
        """Raise if a role may begin and not end."""
        if begins_only:
            raise StoreMismatch(
                f"This role may put records into {self.name}, but not change them: what it began it could not end. "
                f"{ADVICE['42501']}"
            )

    def _check(
        self,
        comment: str | None,
        encoding: str,
        commits: str,
        syncs: str,
        hides_rows: bool,
        begins_only: bool,
    ) -> None:
        self.check_kind(comment)
        self.check_rights(begins_only)
        if hides_rows:
            raise StoreMismatch(
                f"Row level security may hide rows of {self.name} from this role, and a key that it can't see is not "
                f"known to be done. Turn it off (ALTER TABLE {self.name} DISABLE ROW LEVEL SECURITY), or exempt the "
                "role (ALTER ROLE … BYPASSRLS)."
            )
        if encoding not in ENCODINGS:
            raise StoreMismatch(
                f"The database's encoding is {encoding}, which can't hold every key. Use one with encoding UTF8."
            )
        if self._lasting and "off" in (commits, syncs):
            which = "fsync" if syncs == "off" else "synchronous_commit"
            raise StoreMismatch(
                f"{which} is off here: this server forgets what it has acknowledged when it crashes, and effects would "
                f"happen twice. Turn {which} on, or say durability=server to live with that."
            )

    def unreachable(self, lost: Lost) -> StoreError:
        """What to say when there is no answer."""
        why = " ".join(str(lost).split()).rstrip(".?")
        if isinstance(lost, Closed):
            return StoreUnavailable(f"The store {self.shown} is closed.")
        if "unsupported startup parameter" in why:
            return StoreMismatch(f"{self.shown} refused the settings of a session: {why}. {POOLED}")
        if "read-only transaction" in why:
            return StoreUnavailable(
                f"{self.shown} only reads: {why}. It is a standby, or default_transaction_read_only is on. Give the "
                "URL of a server that writes, or turn that off; then try again with the same key."
            )
        if "prepared statement" in why:
            return StoreUnavailable(f"{self.shown} has lost a statement: {why}. {POOLED}")
        return StoreUnavailable(
            f"{self.shown} gave no answer: {why}. Check that the server runs and that host, port, user, password and "
            "database are right; then try again with the same key."
        )

    def translated(self, refusal: Refusal) -> EffectOnceError:
        """An error of the tree that says what to do."""
        code = refusal.code
        what = f"PostgreSQL refused a command on the table {self.name}: {refusal} (SQLSTATE {code})."
        if code.startswith("22"):
            return UsageError(f"{what} Nothing was changed; a value does not fit.")
        if code.startswith("42"):
            return StoreMismatch(f"{what} {ADVICE.get(code, 'Is it the table that effectonce made?')}")
        if code.startswith("53"):
            return StoreUnavailable(f"{what} The server is short of something; make room, then try again.")
        return StoreUnavailable(f"{what} Try again.")

    # The hand

    def chore(self, rows: int) -> Call | None:
        """What is done beside traffic, after so many rows' worth of it."""
        return self.pass_over(rows)

    def chores(self, rows: int) -> list[Call]:
        """What is done for somebody who asks for a purge. The last says what was forgotten."""
        return [self.pass_over(rows)]

    def can_wait(self, call: Call, refusal: Refusal) -> bool:
        """Whether a chore that was refused is as well done another time, and nobody has to hear of it."""
        return False

    def pass_over(self, rows: int) -> Call:
        """A purge of the pages before the hand."""
        return Call(self.sql.one["purge"], (self._hand, ceil(rows / ROWS_IN_A_PAGE), rows))

    def passed(self, call: Call, row: Row) -> int:
        """Move the hand on, unless there is more to forget where it is; how much was forgotten."""
        (_, passed, rows), (gone, hand, pages) = call.values, row
        if gone < rows:
            hand += passed
        self._hand = hand if hand < pages else 0
        return int(gone)
