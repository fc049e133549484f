"""Records in a SQLite file: the default. Survives kill -9 and, with ``durability="full"``, power loss.

Threads share one writing connection by group commit (``_group``); several processes share the file by SQLite's own
lock. A duplicate is answered by one SELECT and writes nothing. The clock is the machine's: all who can open the
file with WAL are on one machine.

Nothing is indexed by expiry. A hand walks through the keys instead, a few rows with every few new claims, and
forgets what has expired: the file stays bounded by its traffic, and no key pays for an index entry.
"""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from .._fork import tell_of_forks
from .._protocol import decide_claim, decide_ending, decide_renewal, is_expired
from .._records import NOBODY, Claim, Completion, Decision, Ending, Record, Renewal, State
from ..errors import StoreError, StoreMismatch, StoreUnavailable, UsageError
from ._group import Group
from ._named import statements
from ._readers import Readers
from .base import Features, Store, StoreStats

if TYPE_CHECKING:
    from ._handover import Handover

SQL = statements("sqlite.sql")
SCHEMA = 1
STATES = tuple(State)
PURGE_EVERY, PURGE_ROWS = 8, 32
"""Every eighth new claim looks at 32 rows: four times what was added."""

Durability = Literal["full", "normal", "off"]
Answer = Any
UNREAD = object()
"""Stands for the answer of a command that has to write."""


class Purge(NamedTuple):
    """Look at so many rows and forget the expired ones."""

    rows: int


class Look(NamedTuple):
    """Read something, on a connection that never writes."""

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
        return cast("Record | None", (await self.submit((Look(partial(_read, key=key)),)))[0])

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
        look = Look(partial(_scan, state=state, after=after, limit=limit))
        return cast("list[Record]", (await self.submit((look,)))[0])

    async def stats(self) -> StoreStats:
        """Count what is there."""
        return cast("StoreStats", (await self.submit((Look(partial(_stats, now=await self.now())),)))[0])


class SQLiteStore(_Verbs):
    """A store in the file ``path``.

    durability    "full": an answer survives power loss; "normal": a crash of the process, "off": likewise, and
                  power loss may corrupt the file
    busy_timeout  how many seconds to wait for another process's write before StoreUnavailable
    clock         the store's clock, in seconds
    """

    def __init__(
        self,
        path: str | Path,
        *,
        durability: Durability = "full",
        busy_timeout: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if durability not in ("full", "normal", "off"):
            raise UsageError(f'durability={durability!r} must be "full", "normal" or "off".')
        self.path = Path(path)
        self._durability, self._busy_timeout, self._clock = durability, busy_timeout, clock
        self._closed = False
        self._since_purge = 0
        self._handover: Handover[Command, Answer] | None = None
        self._starting = threading.Lock()
        self._start()
        self._connect()
        tell_of_forks(self)

    @classmethod
    def from_url(cls, url: str, options: dict[str, str]) -> SQLiteStore:
        """``sqlite:///relative.db``, ``sqlite:////absolute.db``, ``?durability=normal&busy_timeout=10``."""
        path = url.removeprefix("sqlite://").partition("?")[0]
        if not path.startswith("/") or path in ("/", "/:memory:"):
            raise UsageError(
                f"{url!r} names no file. Write sqlite:///effects.db, or memory:// for no file at all."
            )
        known: dict[str, Any] = {"durability": str, "busy_timeout": float}
        try:
            chosen = {name: known[name](value) for name, value in options.items()}
        except (KeyError, ValueError) as error:
            raise UsageError(f"{url!r}: {error}. Known options are durability= and busy_timeout=.") from None
        return cls(path[1:], **chosen)

    async def submit(self, commands: Sequence[Command]) -> list[Answer]:
        """Execute commands together, on the caller's own thread."""
        return self.execute(commands)

    async def now(self) -> float:
        """The store's clock."""
        return self._clock()

    def for_asyncio(self) -> Store:
        """The same verbs, executed on a thread."""
        return _OnThread(self)

    def close(self) -> None:
        """Close the file. What is on its way is finished first."""
        if self._closed:
            return
        self._closed = True
        if self._handover is not None:
            self._handover.close()
        self._rest()
        self._readers.resume()
        self._group.hand_over()

    def before_fork(self) -> None:
        """Close every connection: SQLite's record of a process's locks must be empty when it forks."""
        self._rest()

    def after_fork(self, *, in_child: bool) -> None:
        """Go on; connections are opened again when they are needed."""
        if in_child:
            self._start()
        else:
            self._readers.resume()
            self._group.hand_over()

    def handover(self) -> Handover[Command, Answer]:
        """The way from event loops to a thread; made when the first loop asks."""
        with self._starting:
            if self._closed:
                raise StoreUnavailable(f"The store {self.path} is closed.")
            if self._handover is None:
                from ._handover import Handover

                self._handover = Handover(self.execute)
            return self._handover

    # Connections

    def _start(self) -> None:
        self._writer: sqlite3.Connection | None = None
        self._readers = Readers(self._open)
        self._group: Group[Command, Answer] = Group(self._write)
        self._handover = None
        self._starting = threading.Lock()

    def _rest(self) -> None:
        """Take the lead and keep it, with no connection open."""
        self._group.lead()
        self._readers.rest()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _connect(self) -> None:
        """Open the writing connection, and make or check the schema."""
        self._check_path()
        with _store_errors(self.path):
            connection = self._open()
            self._patiently(self._prepare, connection)
            self._writer = connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Look whose file this is. Tried again from the start when another process is just making it."""
        tables = {
            name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }
        if "effectonce_meta" not in tables:
            if tables:
                raise StoreMismatch(
                    f"{self.path} belongs to another program (it has the table {min(tables)}). Nothing was changed. "
                    "Name another file."
                )
            connection.execute("PRAGMA journal_mode = WAL")
            self._in_transaction(connection, self._create)
        (version,) = connection.execute(SQL["version"]).fetchone() or (None,)
        if version != SCHEMA:
            raise StoreMismatch(
                f"{self.path} has schema {version}, this effectonce knows {SCHEMA}. Nothing was changed. "
                "Use the effectonce that wrote it, or newer."
            )

    def _check_path(self) -> None:
        if self.path.is_dir():
            raise StoreMismatch(
                f"{self.path} is a directory. Name a file in it, such as {self.path / 'effects.db'}."
            )
        if not self.path.absolute().parent.is_dir():
            raise StoreUnavailable(
                f"There is no directory {self.path.absolute().parent} to keep {self.path.name} in."
            )

    def _create(self, connection: sqlite3.Connection) -> None:
        for statement in SQL["schema"].split(";"):
            connection.execute(statement)

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
        connection.execute(f"PRAGMA synchronous = {self._durability}")
        return connection

    # Execution

    def execute(self, commands: Sequence[Command]) -> list[Answer]:
        """Execute commands together on this thread."""
        with _store_errors(self.path):
            if self._group.try_lead():
                try:
                    return self._complete(commands, self._read(self._writing(), commands), self._write)
                finally:
                    self._group.hand_over()
            with self._readers.lend() as reader:
                answers = self._read(reader, commands)
            return self._complete(commands, answers, self._group.submit)

    def _read(self, connection: sqlite3.Connection, commands: Sequence[Command]) -> list[Answer]:
        return [self._patiently(self._by_reading, connection, command) for command in commands]

    def _complete(
        self,
        commands: Sequence[Command],
        answers: list[Answer],
        write: Callable[[list[Command]], list[Answer]],
    ) -> list[Answer]:
        """Fill in the answers that reading could not give, by writing."""
        rest = [index for index, answer in enumerate(answers) if answer is UNREAD]
        if rest:
            for index, answer in zip(rest, write([commands[index] for index in rest]), strict=True):
                answers[index] = answer
        return answers

    def _by_reading(self, connection: sqlite3.Connection, command: Command) -> Answer:
        if type(command) is Claim:
            record = _read(connection, command.key)
            if record is not None:
                decision = decide_claim(record, command, self._clock(), 0)
                return decision if decision.record is record else UNREAD
        elif type(command) is Look:
            return command.read(connection)
        return UNREAD

    def _writing(self) -> sqlite3.Connection:
        if self._writer is None:
            self._connect()
        assert self._writer is not None
        return self._writer

    def _write(self, commands: list[Command]) -> list[Answer]:
        """Execute commands in one transaction. Only the leader of the group comes here."""
        connection = self._writing()
        return cast("list[Answer]", self._in_transaction(connection, self._perform, commands))

    def _perform(self, connection: sqlite3.Connection, commands: list[Command]) -> list[Answer]:
        now = self._clock()
        return [EXECUTE[type(command)](self, connection, command, now) for command in commands]

    def _in_transaction(self, connection: sqlite3.Connection, action: Callable[..., Any], *args: Any) -> Any:
        self._patiently(connection.execute, "BEGIN IMMEDIATE")
        try:
            result = action(connection, *args)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # a full disk has rolled back by itself
                connection.execute("ROLLBACK")
            raise
        return result

    def _patiently(self, action: Callable[..., Any], *args: Any) -> Any:
        """Try until nobody else is in the way. SQLite's own waiting looks only every 0.1 s; this looks more often."""
        deadline, pause = 0.0, 0.0002
        while True:
            try:
                return action(*args)
            except sqlite3.OperationalError as error:
                now = time.monotonic()
                deadline = deadline or now + self._busy_timeout
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or now >= deadline:
                    raise
            time.sleep(pause * random.random())
            pause = min(pause * 1.5, 0.005)

    # What each command does inside the transaction

    def _execute_claim(self, connection: sqlite3.Connection, claim: Claim, now: float) -> Decision:
        record = _read(connection, claim.key)
        floor = 0 if record else connection.execute(SQL["floor"]).fetchone()[0]
        decision = decide_claim(record, claim, now, floor)
        if decision.record is not None and decision.record is not record:
            connection.execute(SQL["write"], _row(decision.record))
            self._since_purge += record is None
            if self._since_purge >= PURGE_EVERY:
                self._since_purge = 0
                self._execute_purge(connection, Purge(PURGE_ROWS), now)
        return decision

    def _execute_renewal(self, connection: sqlite3.Connection, renewal: Renewal, now: float) -> bool:
        renewed = decide_renewal(_read(connection, renewal.key), renewal, now)
        if renewed is not None:
            connection.execute(SQL["write"], _row(renewed))
        return renewed is not None

    def _execute_completion(
        self, connection: sqlite3.Connection, completion: Completion, now: float
    ) -> Ending:
        record = _read(connection, completion.key)
        ending, after = decide_ending(record, completion, now)
        if after is not None and after is not record:
            connection.execute(SQL["write"], _row(after))
        return ending

    def _execute_purge(self, connection: sqlite3.Connection, purge: Purge, now: float) -> int:
        if purge.rows < 1:
            return 0
        (hand,) = connection.execute(SQL["hand"]).fetchone()
        seen = [_record(*row) for row in connection.execute(SQL["look"], (hand, purge.rows))]
        expired = [record for record in seen if is_expired(record, now)]
        if expired:
            connection.executemany(SQL["forget"], [(record.key,) for record in expired])
            connection.execute(SQL["raise_floor"], (max(record.fence for record in expired),))
        connection.execute(SQL["move_hand"], (seen[-1].key if len(seen) == purge.rows else "",))
        return len(expired)


EXECUTE: dict[type, Callable[..., Answer]] = {
    Claim: SQLiteStore._execute_claim,
    Renewal: SQLiteStore._execute_renewal,
    Completion: SQLiteStore._execute_completion,
    Purge: SQLiteStore._execute_purge,
}


class _OnThread(_Verbs):
    """The store for callers on an event loop: everything happens on a thread, a loop's turn at a time."""

    def __init__(self, store: SQLiteStore) -> None:
        self._store = store

    async def submit(self, commands: Sequence[Command]) -> list[Answer]:
        return await self._store.handover().submit(commands)

    async def now(self) -> float:
        return await self._store.now()


def _read(connection: sqlite3.Connection, key: str) -> Record | None:
    row = connection.execute(SQL["read"], (key,)).fetchone()
    return None if row is None else _record(key, *row)


def _record(
    key: str,
    state: int,
    owner: bytes | None,
    fence: int,
    fingerprint: bytes | None,
    lease_until: float | None,
    attempts: int,
    result: bytes | None,
    expires_at: float,
    once: int,
) -> Record:
    return Record(
        key,
        STATES[state],
        owner or NOBODY,
        fence,
        fingerprint or b"",
        lease_until or 0.0,
        attempts,
        result,
        expires_at,
        once == 1,
    )


def _row(record: Record) -> tuple[Any, ...]:
    """A record as columns; what is empty is NULL, which takes no room."""
    key, state, owner, fence, fingerprint, lease_until, attempts, result, expires_at, once = record
    return (
        key, int(state), owner or None, fence, fingerprint or None, lease_until or None, attempts, result, expires_at,
        int(once),
    )  # fmt: skip


def _scan(connection: sqlite3.Connection, state: State | None, after: str, limit: int) -> list[Record]:
    if state is None:
        rows = connection.execute(SQL["scan"], (after, limit))
    else:
        unfinished = state in (State.PENDING, State.IN_DOUBT)
        rows = connection.execute(
            SQL["scan_unfinished" if unfinished else "scan_state"], (state, after, limit)
        )
    return [_record(*row) for row in rows]


def _stats(connection: sqlite3.Connection, now: float) -> StoreStats:
    census = connection.execute(SQL["census"], (now,)).fetchall()
    (pages,), (page_size,) = (
        connection.execute("PRAGMA page_count").fetchone(),
        connection.execute("PRAGMA page_size").fetchone(),
    )
    leases = [lease - now for state, _, _, lease in census if state == State.PENDING and lease is not None]
    return StoreStats(
        keys=sum(count for _, count, _, _ in census),
        bytes=pages * page_size,
        by_state={STATES[state].name: count for state, count, _, _ in census},
        oldest_pending_lease=min(leases, default=None),
        expired=sum(expired for _, _, expired, _ in census),
    )


@contextmanager
def _store_errors(path: Path) -> Iterator[None]:
    """Turn what sqlite3 raises into errors of the tree."""
    try:
        yield
    except sqlite3.Error as error:
        raise _translated(path, error) from error


def _translated(path: Path, error: sqlite3.Error) -> StoreError:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_MISUSE) & 0xFF
    if code in NOT_OURS or "no such table" in str(error):
        return StoreMismatch(
            f"{path} can't be used as a store: {error}. Nothing was changed; name another file."
        )
    return StoreUnavailable(f"{path} did not take the command: {error}. {ADVICE.get(code, 'Try again.')}")


NOT_OURS = {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}
ADVICE = {
    sqlite3.SQLITE_BUSY: "Another process holds the write lock; try again, or raise busy_timeout=.",
    sqlite3.SQLITE_FULL: "The disk is full; make room, then try again with the same key.",
    sqlite3.SQLITE_READONLY: "Give this process the right to write the file and its directory.",
    sqlite3.SQLITE_CANTOPEN: "Check that the path exists and that this process may read and write it.",
}
