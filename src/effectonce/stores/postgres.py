"""Records in a PostgreSQL table: every step is one statement, and many steps share one.

The server's clock decides. A new key costs two statements, a duplicate one that writes nothing, and a batch no more
than that: steps of a kind are the rows of one statement. Threads hold connections with prepared statements; callers on
an event loop share a few (``_turns``), so that whatever comes in one turn of the loop is one round trip.

Only the key is indexed. The end of an attempt changes its row where it is, and a hand walks through the table's pages,
a few with every few new claims, and forgets what has expired there.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from math import ceil, inf
from typing import Any, Protocol, cast
from urllib.parse import unquote_plus
from weakref import WeakKeyDictionary, finalize, ref

from .._fork import tell_of_forks
from .._protocol import decide_claim
from .._records import Claim, Completion, Decision, Ending, Record, State
from ..errors import EffectOnceError, MissingExtra, StoreUnavailable, UsageError
from ._postgres_sql import (
    AGAIN,
    ITS_OWN,
    KINDS,
    LOOK,
    MICROS,
    TRY_AGAIN,
    Answer,
    Call,
    Group,
    Lost,
    Refusal,
    Row,
    Statements,
    add_values,
    end_values,
    grouped,
    make_ready,
    record_of,
    translated,
)  # fmt: skip
from ._steps import DONE, Add, Added, End, Read, Step, SteppingStore
from ._turns import Turns
from ._urls import shown
from .base import Features, Store, StoreStats

PURGE_EVERY, PURGE_ROWS, ROWS_IN_A_PAGE = 32, 128, 32
"""After 32 new claims the hand passes some 128 rows."""
LANES = 3
"""Round trips of an event loop that may be on their way at once."""


class Wires(Protocol):
    """Connections in one colour."""

    async def run(self, calls: Sequence[Call], together: bool = False) -> Sequence[Answer]:
        """Have statements executed in one round trip, each a transaction of its own or all of them one."""
        ...

    def close(self) -> None:
        """Close them."""

    def forget(self) -> None:
        """Let go of them in a forked child."""


class _Table:
    """What both colours share: the table's name and statements, and where the hand is."""

    def __init__(self, url: str, name: str, seconds: float, create: bool) -> None:
        self.shown, self.name, self.seconds, self.create = shown(url), name, seconds, create
        self.sql = Statements(name)
        self.ready = False
        self.new_claims = 0
        self.hand = random.getrandbits(31)  # a process of few claims must not always purge the same pages

    def unreachable(self, lost: Lost) -> StoreUnavailable:
        """What to say when there is no answer."""
        why = " ".join(str(lost).split())
        return StoreUnavailable(
            f"{self.shown} gave no answer: {why}. Check that the server runs and that host, port, user, password and "
            "database are right; then try again with the same key."
        )

    def pass_over(self, rows: int) -> Call:
        """A purge of the pages before the hand."""
        return Call(self.sql.one["purge"], (self.hand, self.hand + ceil(rows / ROWS_IN_A_PAGE), rows))

    def passed(self, call: Call, row: Row) -> bool:
        """Move the hand on; False if it was not in the table at all."""
        (first, after, rows), (gone, pages) = call.values, row
        if first >= pages:
            self.hand = first % pages if pages else 0
        elif gone < rows:
            self.hand = after if after < pages else 0
        return bool(first < pages or not pages)


class _Verbs(SteppingStore):
    """The verbs over one table. The two colours differ in how statements travel."""

    features = Features()
    _table: _Table

    async def run(self, calls: Sequence[Call], together: bool = False) -> Sequence[Answer]:
        """Have statements executed in one round trip."""
        raise NotImplementedError

    def purge_aside(self) -> None:
        """Let the hand pass some rows while nobody waits for it."""
        raise NotImplementedError

    async def speak(self, calls: Sequence[Call], together: bool = False) -> Sequence[Answer]:
        """The same, over a table that is there and ours."""
        table = self._table
        try:
            if not table.ready:
                await make_ready(table.sql, table.name, self.run, create=table.create)
                table.ready = True
            return await self.run(calls, together)
        except Lost as lost:
            raise table.unreachable(lost) from lost
        except Refusal as refusal:  # a value that can't even be sent
            return [refusal] * len(calls)

    async def ask(self, name: str, *values: Any) -> list[Row]:
        """The rows of one statement."""
        (rows,) = self._rows(await self.speak([Call(self._table.sql.one[name], values)]))
        return rows

    def _rows(self, answers: Iterable[Answer]) -> list[list[Row]]:
        for answer in answers:
            if isinstance(answer, Refusal):
                raise translated(answer, self._table.name)
        return cast("list[list[Row]]", list(answers))

    # Steps

    async def send(self, steps: Sequence[Step]) -> list[Any]:
        """Have steps done in one round trip."""
        replies = await self.execute(steps)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    async def execute(self, steps: Sequence[Step]) -> list[Any]:
        """Have steps done in one round trip; an exception is the reply to a step that failed by itself."""
        if len(steps) == 1:
            kind = KINDS[type(steps[0])]
            (answer,) = await self.speak((Call(self._table.sql.one[kind.name], kind.values(steps[0])),))
            if type(answer) is list:
                reply = kind.reply(steps[0].key, answer[0]) if answer else kind.without_row
                if reply is not AGAIN and reply is not LOOK:
                    if type(reply) is Added:
                        self._count(1)
                    return [reply]
        return await self._execute_all(steps)

    async def _execute_all(self, steps: Sequence[Step]) -> list[Any]:
        steps, replies = list(steps), [AGAIN] * len(steps)
        give_up = time.monotonic() + self._table.seconds
        while places := [place for place, reply in enumerate(replies) if reply is AGAIN or reply is LOOK]:
            if time.monotonic() > give_up:
                raise StoreUnavailable(f"{self._table.shown} always served others first. Try again.")
            for place in places:
                if replies[place] is LOOK:
                    steps[place] = Read(steps[place].key)
            groups = grouped(steps, places)
            answers = await self.speak([group.call(self._table.sql, steps) for group in groups])
            for group, answer in zip(groups, answers, strict=True):
                if isinstance(answer, Refusal):
                    await self._refused(answer, group, steps, replies)
                else:
                    group.settle(answer, steps, replies)
        self._count(sum(type(reply) is Added for reply in replies))
        return replies

    async def _refused(
        self, refusal: Refusal, group: Group, steps: Sequence[Step], replies: list[Any]
    ) -> None:
        """A statement failed, for all of its rows: send each alone if only one of them may be to blame."""
        firsts = [places[0] for places in group.places]
        if refusal.code in TRY_AGAIN:
            return
        for place in firsts:
            if len(firsts) > 1 and refusal.code.startswith(ITS_OWN):
                replies[place] = await self._alone(steps[place])
            else:
                replies[place] = translated(refusal, self._table.name)

    async def _alone(self, step: Step) -> Any:
        try:
            (reply,) = await self.execute((step,))
        except EffectOnceError as error:
            return error
        return reply

    def _count(self, new_claims: int) -> None:
        table = self._table
        table.new_claims += new_claims
        if table.new_claims >= PURGE_EVERY:
            table.new_claims = 0
            self.purge_aside()

    # Everything else

    async def purge(self, limit: int = 256) -> int:
        """Let the hand pass over some pages and forget at most ``limit`` expired records there."""
        in_table = limit < 1
        gone = 0
        while not in_table:
            call = self._table.pass_over(limit)
            ((row,),) = self._rows(await self.speak([call]))
            gone, in_table = row[0], self._table.passed(call, row)
        return gone

    async def scan(self, state: State | None = None, after: str = "", limit: int = 256) -> list[Record]:
        """Records in key order."""
        asked = Call(self._table.sql.one["scan"], (after, state, limit))
        return [record_of(row[0], row) for row in await self._read_all(asked)]

    async def now(self) -> float:
        """The server's clock."""
        ((now,),) = await self.ask("now")
        return cast("float", now)

    async def stats(self) -> StoreStats:
        """Count what is there: the whole table is read once."""
        census = await self._read_all(Call(self._table.sql.one["census"]))
        ((size,),) = await self.ask("size")
        return StoreStats(
            keys=sum(count for _, count, _, _ in census),
            bytes=size,
            by_state={State(state).name: count for state, count, _, _ in census},
            oldest_pending_lease=next(
                (lease for state, _, _, lease in census if state == State.PENDING), None
            ),
            expired=sum(expired for _, _, expired, _ in census),
        )

    async def _read_all(self, call: Call) -> list[Row]:
        may = Call(self._table.sql.one["may_read_all"])
        _, rows = self._rows(await self.speak([may, call], together=True))
        return rows

    async def migrate(self) -> bool:
        """Make the table, or bring it up to date; whether there was something to do."""
        table = self._table
        try:
            made = await make_ready(table.sql, table.name, self.run, create=True)
        except Lost as lost:
            raise table.unreachable(lost) from lost
        table.ready = True
        return made


class PostgresStore(_Verbs):
    """A store in a table of the database that ``url`` names; whatever libpq understands may stand in it.

    table    the table's name
    schema   the schema it is in, if not the first of the search path
    pool     how many connections blocking callers may hold at once; an event loop has a few of its own
    timeout  how many seconds a command may take before StoreUnavailable
    create   whether the table is made when it is missing; if not, ``effectonce migrate`` makes it
    prepare  whether statements are prepared: not behind a pooler that lends connections for a transaction
    driver   what speaks for callers on an event loop: "psycopg" or "asyncpg"
    """

    def __init__(
        self,
        url: str,
        *,
        table: str = "effectonce",
        schema: str | None = None,
        pool: int = 16,
        timeout: float = 5.0,
        create: bool = True,
        prepare: bool = True,
        driver: str = "psycopg",
    ) -> None:
        for option, name in (("table", table), ("schema", schema)):
            if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,62}", name):
                raise UsageError(f"{option}={name!r} must be letters, digits and _, at most 63 of them.")
        if pool < 1 or not 0 < timeout < inf:
            raise UsageError(f"pool={pool} and timeout={timeout} must be above zero.")
        if driver not in ("psycopg", "asyncpg"):
            raise UsageError(f'driver={driver!r} must be "psycopg" or "asyncpg".')
        self._table = _Table(
            url, f'"{table}"' if schema is None else f'"{schema}"."{table}"', timeout, create
        )
        blocking = _module("psycopg", "postgres")
        self._wires = blocking.ThreadWires(blocking.dialler(url, timeout, prepare), prepare, timeout, pool)
        beside = blocking if driver == "psycopg" else _module("asyncpg", "asyncpg")
        dial = beside.dialler(url, timeout, prepare)
        self._on_loops = _OnLoops(self._table, lambda: beside.LoopWires(dial, prepare, timeout, LANES + 1))
        self._add, self._end = self._table.sql.one["add"], self._table.sql.one["end"]
        tell_of_forks(self)

    @classmethod
    def from_url(cls, url: str, options: dict[str, str]) -> PostgresStore:
        """``postgresql://user:password@host/database?table=effects&pool=16&timeout=5&create=no&prepare=no``.

        With ``postgresql+asyncpg://`` callers on an event loop are served by asyncpg.
        """
        known: dict[str, Callable[[str], Any]] = {
            "table": str, "schema": str, "pool": int, "timeout": float, "create": _yes_or_no, "prepare": _yes_or_no,
        }  # fmt: skip
        try:
            chosen = {name: known[name](value) for name, value in options.items() if name in known}
        except (KeyError, ValueError):
            raise UsageError(
                f"{shown(url)!r} has an option that makes no sense. Known are table=NAME, schema=NAME, pool=NUMBER, "
                "timeout=SECONDS, create=yes|no, prepare=yes|no, and whatever libpq knows."
            ) from None
        plain, _, query = url.partition("?")
        others = "&".join(
            part for part in query.split("&") if unquote_plus(part.partition("=")[0]) not in known
        )
        scheme, _, place = plain.partition("://")
        dialect, _, driver = scheme.partition("+")
        return cls(f"{dialect}://{place}?{others}".rstrip("?"), driver=driver or "psycopg", **chosen)

    def ddl(self) -> str:
        """The statements that ``migrate`` executes on an empty database."""
        return "".join(f"{statement};\n" for statement in self._table.sql.schema)

    async def claim(self, claim: Claim) -> Decision:
        """Decide one claim. A new key and a finished one are written out here, since every call pays for each step."""
        if claim.may_create:
            try:
                answer = self._wires.run_one(self._add, add_values(claim))
            except Lost as lost:
                raise self._table.unreachable(lost) from lost
            if type(answer) is list:
                row = answer[0]
                fence = row[2]
                if row[1] is not None:
                    record = record_of(claim.key, row)
                    decision = decide_claim(record, claim, row[7], 0)
                    if decision.record is record:
                        return decision
                elif fence is not None:
                    self._count(1)
                    return decide_claim(None, claim, fence / MICROS, fence - 1)
        return await super().claim(claim)

    async def complete(self, completion: Completion) -> Ending:
        """End a claim; the untroubled end is written out here too."""
        if completion.owner and completion.began:
            try:
                answer = self._wires.run_one(self._end, end_values(completion))
            except Lost as lost:
                raise self._table.unreachable(lost) from lost
            if answer and type(answer) is list:
                return DONE
        return await super().complete(completion)

    async def run(self, calls: Sequence[Call], together: bool = False) -> Sequence[Answer]:
        """Have statements executed, on the caller's own thread."""
        return cast("Sequence[Answer]", await self._wires.run(calls, together))

    def purge_aside(self) -> None:
        """Let the hand pass some rows on a connection that nobody needs just now."""
        call = self._table.pass_over(PURGE_ROWS)

        def then(answers: Sequence[Answer]) -> None:
            if not isinstance(answers[0], Refusal):
                self._table.passed(call, answers[0][0])

        with suppress(Lost, EffectOnceError):  # nobody asked for it
            self._wires.run_aside([call], then)

    def for_asyncio(self) -> Store:
        """The same verbs for callers on event loops."""
        return self._on_loops

    def close(self) -> None:
        """Close all connections. What is on its way is finished first."""
        self._wires.close()
        self._on_loops.close()

    def before_fork(self) -> None:
        """Nothing to bring to rest: a child opens connections of its own."""

    def after_fork(self, *, in_child: bool) -> None:
        """The parent's connections are not the child's."""
        if in_child:
            self._wires.forget()
            self._on_loops.forget()


class _Loop:
    """What one event loop has: its connections, and the turns in which its callers go."""

    def __init__(self, wires: Wires, execute: Callable[[Sequence[Step]], Any]) -> None:
        self.wires = wires
        self.turns: Turns[Step, Any] = Turns(execute, LANES)
        self.purging: set[asyncio.Task[None]] = set()


class _OnLoops(_Verbs):
    """The store for callers on event loops: each loop has its own connections."""

    def __init__(self, table: _Table, make_wires: Callable[[], Wires]) -> None:
        self._table = table
        self._make_wires = make_wires
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Loop] = WeakKeyDictionary()
        self._latest: tuple[Callable[[], asyncio.AbstractEventLoop | None], _Loop | None] = (_no_loop, None)

    async def send(self, steps: Sequence[Step]) -> list[Any]:
        """Have steps done, together with those of everyone who waits on this loop."""
        return cast("list[Any]", await self._here().turns.submit(steps))

    async def claim(self, claim: Claim) -> Decision:
        """Decide one claim. A new key and a finished one are written out here, since every call pays for each step."""
        if claim.may_create:
            (reply,) = await self._here().turns.submit((Add(claim),))
            if type(reply) is Added:
                return decide_claim(None, claim, reply.now, reply.fence - 1)
            record, now = reply
            decision = decide_claim(record, claim, now, 0)
            if decision.record is record:
                return decision
        return await super().claim(claim)

    async def complete(self, completion: Completion) -> Ending:
        """End a claim; the untroubled end is written out here too."""
        if completion.owner and completion.began:
            (reply,) = await self._here().turns.submit((End(completion),))
            if reply is DONE:
                return Ending.DONE
        return await super().complete(completion)

    async def run(self, calls: Sequence[Call], together: bool = False) -> Sequence[Answer]:
        """Have statements executed; the loop goes on meanwhile."""
        return await self._here().wires.run(calls, together)

    def purge_aside(self) -> None:
        """Let the hand pass some rows in a task of its own."""
        here = self._here()
        if not here.purging:
            task = asyncio.get_running_loop().create_task(self._purge_quietly())
            here.purging.add(task)
            task.add_done_callback(here.purging.discard)

    async def _purge_quietly(self) -> None:
        with suppress(EffectOnceError):  # nobody asked for it
            await self.purge(PURGE_ROWS)

    def close(self) -> None:
        """Close the connections of every loop, on the loop's own thread where it runs."""
        with self._lock:
            self._closed = True
            self._latest = (_no_loop, None)
            loops = list(self._loops.items())
            self._loops.clear()
        for loop, here in loops:
            if loop.is_running() and loop is not asyncio._get_running_loop():
                loop.call_soon_threadsafe(here.wires.close)
            else:
                here.wires.close()

    def forget(self) -> None:
        """Let go of everything in a forked child."""
        for here in list(self._loops.values()):
            here.wires.forget()
        self._start()

    def _here(self) -> _Loop:
        loop = asyncio.get_running_loop()
        latest, here = self._latest
        if here is None or latest() is not loop:
            here = self._arrive(loop)
            self._latest = (ref(loop), here)
        return here

    def _arrive(self, loop: asyncio.AbstractEventLoop) -> _Loop:
        """Find what belongs to a loop, and put away what belonged to loops that are closed."""
        with self._lock:
            if self._closed:
                raise StoreUnavailable(f"The store {self._table.shown} is closed.")
            for other in [other for other in self._loops if other.is_closed()]:
                self._loops.pop(other).wires.close()
            if loop not in self._loops:
                wires = self._make_wires()
                finalize(loop, wires.close)
                self._loops[loop] = _Loop(wires, self.execute)
            return self._loops[loop]


def _no_loop() -> None:
    return None


def _module(driver: str, extra: str) -> Any:
    """The module that speaks through a driver."""
    try:
        return import_module(f"._postgres_{driver}", __package__)
    except ImportError as error:
        raise MissingExtra(
            f"A PostgreSQL store needs {driver}, which can't be imported ({error}). Install effectonce[{extra}]."
        ) from error


def _yes_or_no(text: str) -> bool:
    return {"yes": True, "no": False}[text]
