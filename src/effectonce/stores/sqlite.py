"""Records in a SQLite file: the default. Survives kill -9 and, with ``durability="full"``, power loss.

A verb reads a record, lets the protocol decide, and writes the answer only if the record still is the one it read:
one statement, one commit. Threads share one writing connection by group commit (``_group``); several processes
share the file by SQLite's own lock. A duplicate is answered by one SELECT and writes nothing. The clock is the
machine's: all who can open the file with WAL are on one machine.

Nothing is indexed by expiry. A hand walks through the keys instead, a few rows with every few new claims, and
forgets what has expired: the file stays bounded by its traffic, and no key pays for an index entry.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from .._fork import tell_of_forks
from .._protocol import decide_claim, decide_ending, decide_renewal, is_expired
from .._records import Claim, Completion, Decision, Ending, Record, Renewal, State
from ..errors import UsageError
from ._group import Group
from ._readers import Readers
from ._sqlite_file import FAILURES, SQL, DatabaseFile, roll_back
from ._sqlite_rows import Pen, outline, read, replaced, row_of, scan, stats
from ._urls import shown
from .base import Features, Store, StoreStats

if TYPE_CHECKING:
    from ._handover import Handover

PURGE_EVERY, PURGE_SHARE = 32, 4
"""After 32 new claims the hand passes four times as many rows, with the next commit."""
LOOK_EVERY_SECONDS = 1.0
"""How long claims go on before it is noticed that the file was removed or replaced."""
LAST = b""
"""Follows every key: in SQLite a blob is greater than any text."""

Durability = Literal["full", "normal", "off"]
Answer = Any
AGAIN: Answer = object()
"""Stands for the answer of a command whose record was changed by another process between reading and writing."""
FLOOR, INSERT, END, HOLD = (SQL[name] for name in ("floor", "insert", "end", "hold"))


class Purge(NamedTuple):
    """Pass so many rows and forget the expired ones."""

    rows: int


class Look(NamedTuple):
    """Read something."""

    read: Callable[[sqlite3.Connection], Any]


Command = Claim | Renewal | Completion | Purge | Look


class _Verbs(Store):
    """The verbs, once: each is a command. The two colours differ in who executes it."""

    features = Features()

    async def submit(self, commands: Sequence[Command]) -> list[Answer]:
        """Execute commands together."""
        raise NotImplementedError

    async def claim(self, claim: Claim) -> Decision:
        """Decide one claim: a duplicate by one read, a new key by one durable write."""
        return cast("Decision", (await self.submit((claim,)))[0])

    async def renew(self, renewal: Renewal) -> bool:
        """Extend a lease."""
        return cast("bool", (await self.submit((renewal,)))[0])

    async def complete(self, completion: Completion) -> Ending:
        """End a claim; the answer comes when it is on the disk."""
        return cast("Ending", (await self.submit((completion,)))[0])

    async def get(self, key: str) -> Record | None:
        """Read a record."""
        return cast("Record | None", (await self.submit((Look(partial(read, key=key)),)))[0])

    async def purge(self, limit: int = 256) -> int:
        """Move the hand over ``limit`` rows and forget the expired ones."""
        return cast("int", (await self.submit((Purge(limit),)))[0])

    async def claim_many(self, claims: Sequence[Claim]) -> list[Decision]:
        """Decide many claims in one write."""
        return await self.submit(claims)

    async def renew_many(self, renewals: Sequence[Renewal]) -> list[bool]:
        """Renew many leases in one write."""
        return await self.submit(renewals)

    async def complete_many(self, completions: Sequence[Completion]) -> list[Ending]:
        """End many claims in one write."""
        return await self.submit(completions)

    async def scan(self, state: State | None = None, after: str = "", limit: int = 256) -> list[Record]:
        """Records in key order."""
        look = Look(partial(scan, state=state, after=after, limit=limit))
        return cast("list[Record]", (await self.submit((look,)))[0])

    async def stats(self) -> StoreStats:
        """Count what is there."""
        return cast("StoreStats", (await self.submit((Look(partial(stats, now=await self.now())),)))[0])


class SQLiteStore(_Verbs):
    """A store in the file ``path``.

    durability    "full": an answer survives power loss; "normal": a crash of the process; "off": likewise, and
                  power loss may corrupt the file
    busy_timeout  how many seconds to wait for another process's write before StoreUnavailable
    beside        make the tables also in a file that has others already: that of your application, for atomic mode
    clock         the store's clock, in seconds
    """

    def __init__(
        self,
        path: str | Path,
        *,
        durability: Durability = "full",
        busy_timeout: float = 5.0,
        beside: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if durability not in ("full", "normal", "off"):
            raise UsageError(f'durability={durability!r} must be "full", "normal" or "off".')
        self._file = DatabaseFile(path, durability, busy_timeout, beside)
        self._clock = clock
        self._writer: sqlite3.Connection | None = None
        self._pen: sqlite3.Cursor | None = None
        self._new_claims = 0
        self._in_use = False  # by more than a few new keys
        self._expect_new = True
        self._floor = 0
        self._looked = -inf
        self._handover: Handover[Command, Answer] | None = None
        self._start()
        with self._file.errors():
            (self._hand,) = self._writing().execute(SQL["hand"]).fetchone()
        tell_of_forks(self)

    @classmethod
    def from_url(cls, url: str, options: dict[str, str]) -> SQLiteStore:
        """``sqlite:///relative.db``, ``sqlite:////absolute.db``, ``?durability=normal&busy_timeout=10&beside=yes``."""
        path = url.removeprefix("sqlite://").partition("?")[0]
        if not path.startswith("/") or path in ("/", "/:memory:"):
            raise UsageError(
                f"{shown(url)!r} names no file. Write sqlite:///effects.db, or memory:// for no file at all."
            )
        yes_or_no = {"yes": True, "no": False}.__getitem__
        known: dict[str, Any] = {"durability": str, "busy_timeout": float, "beside": yes_or_no}
        try:
            chosen = {name: known[name](value) for name, value in options.items()}
        except (KeyError, ValueError):
            raise UsageError(
                f"{shown(url)!r} has an option that is unknown or makes no sense. Known are durability=full|normal|"
                "off, busy_timeout=SECONDS and beside=yes|no."
            ) from None
        return cls(path[1:], **chosen)

    async def now(self) -> float:
        """The store's clock."""
        return self._clock()

    async def submit(self, commands: Sequence[Command]) -> list[Answer]:
        """Execute commands together, on the caller's own thread."""
        return self.execute(commands)

    async def claim(self, claim: Claim) -> Decision:
        """Decide one claim: a duplicate by one read, a new key by one durable write."""
        return self._execute_one(claim, self._perform_claim)  # type: ignore[no-any-return]

    async def complete(self, completion: Completion) -> Ending:
        """End a claim; the answer comes when it is on the disk."""
        return self._execute_one(completion, self._perform_completion)  # type: ignore[no-any-return]

    def migrate(self) -> bool:
        """Nothing is left to do: whoever opens a file makes what it needs there, or brings it up to date."""
        return False

    def for_asyncio(self) -> Store:
        """The same verbs, executed on a thread."""
        return _OnThread(self)

    def handover(self) -> Handover[Command, Answer]:
        """The way from event loops to a thread; made when the first loop asks."""
        with self._starting:
            self._file.check_open()  # a thread that begins now would be ended by nobody
            if self._handover is None:
                from ._handover import Handover

                self._handover = Handover(self.execute, _is_common)
            return self._handover

    def close(self) -> None:
        """Close the file. What is on its way is finished first."""
        with self._starting:
            if self._file.closed:
                return
            self._file.closed = True
        if self._handover is not None:
            self._handover.close()
        self._rest()
        self._readers.resume()
        self._group.lead.release()

    def before_fork(self) -> None:
        """Close every connection: SQLite's account of a process's locks must be empty when it forks."""
        self._rest()

    def after_fork(self, *, in_child: bool) -> None:
        """Go on; connections are opened again when they are needed."""
        if in_child:
            self._start()
        else:
            self._readers.resume()
            self._group.lead.release()

    def _start(self) -> None:
        self._writer = self._pen = None
        self._readers = Readers(self._file.open)
        self._group: Group[Command, Answer] = Group(self._write, (sqlite3.OperationalError,))
        self._handover = None
        self._starting = threading.Lock()

    def _rest(self) -> None:
        """Take the lead and keep it, with no connection open, and nobody waiting who came before."""
        self._group.lead.acquire()
        self._group.serve_all()
        self._readers.rest()
        if self._writer is not None:
            self._writer.close()
            self._writer = self._pen = None
        self._file.forget_log()

    # Execution

    def execute(self, commands: Sequence[Command]) -> list[Answer]:
        """Execute commands together on this thread: at once when nobody is writing, else with the next write."""
        try:
            if not self._group.busy:
                with self._group.lead:
                    looked = self._file.patiently(self._by_reading, self._writing(), commands)
                    return self._filled(looked, commands, self._write)
            if not self._may_be_known(commands):
                return self._group.submit(list(commands))
            with self._readers.lend() as reader:
                looked = self._file.patiently(self._by_reading, reader, commands)
            return self._filled(looked, commands, self._group.submit)
        except FAILURES as error:
            raise self._file.translated(error) from error

    def _execute_one(self, command: Command, perform: Callable[..., Answer]) -> Answer:
        """The same for one command: when nobody is in the way it is a statement or two and nothing else."""
        group = self._group
        if group.lead.locked() or group.queue:
            return self.execute((command,))[0]
        with group.lead:
            try:
                pen = self._pen
                if pen and not pen.connection.in_transaction and self._new_claims < PURGE_EVERY:
                    answer = perform(pen, command, self._clock())
                    if answer is not AGAIN:
                        return answer
                return self._write((command,))[0]
            except FAILURES:  # perhaps somebody was in the way; what failed has changed nothing
                return self._again(command)

    def _again(self, command: Command) -> Answer:
        with self._file.errors():
            return self._write((command,))[0]

    def _by_reading(self, reader: sqlite3.Connection, commands: Sequence[Command]) -> list[Answer]:
        """Answer what needs no write, without waiting for the one on its way."""
        return [self._look(reader, command) for command in commands]

    def _may_be_known(self, commands: Sequence[Command]) -> bool:
        """Whether reading is worth a try before queueing up to write."""
        return any(type(c) is Look or (type(c) is Claim and not self._expect_new) for c in commands)

    def _filled(
        self,
        answers: list[Answer],
        commands: Sequence[Command],
        write: Callable[[list[Command]], list[Answer]],
    ) -> list[Answer]:
        """Add the answers that reading could not give, by writing."""
        rest = [command for command, answer in zip(commands, answers, strict=True) if answer is AGAIN]
        written = iter(write(rest)) if rest else iter(())
        return [next(written) if answer is AGAIN else answer for answer in answers]

    def _look(self, reader: sqlite3.Connection, command: Command) -> Answer:
        if type(command) is Look:
            self._file.check_places()
            return command.read(reader)
        record = read(reader, command.key) if type(command) is Claim else None
        if record is None:
            return AGAIN
        decision = decide_claim(record, cast("Claim", command), self._clock(), 0)
        return decision if decision.record is record else AGAIN

    def _writing(self) -> sqlite3.Connection:
        if self._writer is None:
            self._writer = self._file.open_checked()
            self._pen = self._writer.cursor()
            self._in_use = False
        roll_back(self._writer)  # what a signal has left open; a write inside it would be none
        return self._writer

    def _write(self, commands: Sequence[Command]) -> list[Answer]:
        """Execute commands, in one transaction if they are several. Only the leader of the group comes here."""
        connection = self._writing()
        if self._new_claims >= PURGE_EVERY and not self._in_use:
            self._in_use = True
            self._file.make_room(connection)
        rides_along = self._new_claims >= PURGE_EVERY and type(commands[0]) is Completion
        if len(commands) > 1 or rides_along or type(commands[0]) is Purge:
            return cast("list[Answer]", self._file.in_transaction(connection, self._perform_all, commands))
        return [self._file.patiently(self._perform, connection, commands[0])]

    def _perform_all(self, connection: sqlite3.Connection, commands: Sequence[Command]) -> list[Answer]:
        """Perform commands inside a transaction, and let a purge ride along when it is due."""
        answers = [self._perform(connection, command) for command in commands]
        if self._new_claims >= PURGE_EVERY:
            self._perform_purge(connection, Purge(self._new_claims * PURGE_SHARE), self._clock())
            self._new_claims = 0
        return answers

    def _perform(self, connection: sqlite3.Connection, command: Command) -> Answer:
        answer = AGAIN
        while answer is AGAIN:
            answer = PERFORM[type(command)](self, connection, command, self._clock())
        return answer

    # What each command does

    def _perform_claim(self, pen: Pen, claim: Claim, now: float) -> Answer:
        """Expect what the last claim met: a new key costs one INSERT then, a known one a SELECT."""
        if not 0 <= now - self._looked < LOOK_EVERY_SECONDS:
            self._file.check_places()
            self._looked = now
        busy = None
        if self._expect_new and claim.may_create:
            decision = decide_claim(None, claim, now, self._floor)
            new = decision.record
            try:
                if new and pen.execute(INSERT, (*row_of(new), self._floor)).rowcount:
                    self._new_claims += 1
                    return decision
            except sqlite3.OperationalError as error:  # a duplicate does not need the lock that is missing
                busy = error
        record = read(pen, claim.key)
        self._expect_new = record is None
        if record is None and claim.may_create:
            if busy is not None:
                raise busy
            (self._floor,) = pen.execute(FLOOR).fetchone()
            return AGAIN
        decision = decide_claim(record, claim, now, 0)
        after = decision.record
        if after is None or record is None or after is record:
            return decision
        return decision if replaced(pen, record, after) else AGAIN

    def _perform_renewal(self, pen: Pen, renewal: Renewal, now: float) -> Answer:
        key, owner, fence, lease, keep, progress = renewal
        until = now + lease
        if pen.execute(HOLD, (key, owner, fence, until, until + keep, progress)).rowcount:
            return True
        record = read(pen, key)
        renewed = decide_renewal(record, renewal, now)
        if record is None or renewed is None:
            return False
        return True if replaced(pen, record, renewed) else AGAIN

    def _perform_completion(self, pen: Pen, completion: Completion, now: float) -> Answer:
        key, owner, fence, state, result, keep, began = completion
        if owner and began and pen.execute(END, (key, owner, fence, state, result, now + keep)).rowcount:
            return Ending.DONE
        record = read(pen, key)
        ending, after = decide_ending(record, completion, now)
        if record is None or after is None or after is record:
            return ending
        return ending if replaced(pen, record, after) else AGAIN

    def _perform_purge(self, connection: sqlite3.Connection, purge: Purge, now: float) -> int:
        """Always inside a transaction: nobody may revive a record between the look and the delete."""
        if purge.rows < 1:
            return 0
        after = connection.execute(SQL["next_hand"], (self._hand, purge.rows - 1)).fetchone()
        passed = connection.execute(SQL["passed"], (self._hand, after[0] if after else LAST, now))
        expired = [row for row in passed if is_expired(outline(*row), now)]
        self._hand = after[0] if after else ""
        if expired:
            connection.executemany(SQL["forget"], [(row[0],) for row in expired])
            connection.execute(SQL["raise_floor"], (max(row[2] for row in expired),))
            connection.execute(SQL["keep_hand"], (self._hand,))
        return len(expired)

    def _perform_look(self, connection: sqlite3.Connection, look: Look, now: float) -> Answer:
        return look.read(connection)


PERFORM: dict[type, Callable[..., Answer]] = {
    Claim: SQLiteStore._perform_claim,
    Renewal: SQLiteStore._perform_renewal,
    Completion: SQLiteStore._perform_completion,
    Purge: SQLiteStore._perform_purge,
    Look: SQLiteStore._perform_look,
}


class _OnThread(_Verbs):
    """The store for callers on an event loop: everything happens on a thread, a loop's turn at a time."""

    def __init__(self, store: SQLiteStore) -> None:
        self._store = store

    async def submit(self, commands: Sequence[Command]) -> list[Answer]:
        return await self._store.handover().submit(commands)

    async def now(self) -> float:
        return await self._store.now()

    def close(self) -> None:
        self._store.close()


def _is_common(error: Exception) -> bool:
    """Whether the file could not be written at all, as opposed to one command."""
    return isinstance(error.__cause__, sqlite3.OperationalError)
