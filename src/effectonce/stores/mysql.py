"""Records in a MySQL or MariaDB table. The server's clock decides, and what is answered has been committed.

New or known, a claim is one packet: an INSERT that leaves alone what is there, and what is there then. An ending is one
UPDATE. What is said is in ``_mysql_sql`` and ``sql/mysql.sql``, the connections are in ``_mysql_lines``; here is who
uses them. Threads have a few lines between them, and every event loop has a few of its own. A caller who finds one free
goes alone and at once; those who find none go together.

Nothing is indexed by expiry. A hand walks through the keys instead, with the traffic, and looks for what has expired;
with a later commit it is forgotten.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar
from urllib.parse import unquote, urlsplit

from .._fork import tell_of_forks
from .._protocol import decide_claim
from .._records import Claim, Completion, Decision, Ending, Record, State
from ..errors import EffectOnceError, StoreError, StoreUnavailable, UsageError
from ._group import Group
from ._mysql_lines import Address, Line, Lines, driver, open_loop_line, open_thread_line
from ._mysql_sql import Language, Refusal, Server, Talk
from ._mysql_steps import Stepper
from ._steps import BUSY, DONE, HELD, KEPT, Add, Added, End, Step, SteppingStore, unless_failed
from ._turns import Turns
from ._urls import shown
from .base import Features, Store, StoreStats

T = TypeVar("T")

LINES = 8
"""Connections of all threads together."""
LOOP_LINES = 2
"""Connections of an event loop."""
LOOK_SECONDS = 60.0
"""How long a question may take that goes through the whole table."""

Begin = Callable[[Server], Talk[T]]


class _Verbs(SteppingStore):
    """What the two colours have in common beside the steps."""

    features = Features()
    store: MySQLStore

    async def send_once(self, steps: Sequence[Step]) -> Sequence[Any]:
        """Have steps done. An exception is the reply to a step that failed by itself."""
        raise NotImplementedError

    async def pause(self, seconds: float) -> None:
        """Let time pass."""
        raise NotImplementedError

    async def send(self, steps: Sequence[Step]) -> list[Any]:
        """Have steps done, and wait for those whose records somebody has, where nobody else has to wait."""
        return unless_failed(await self._settled(steps))

    async def send_each(self, steps: Sequence[Step]) -> list[Any]:
        """The same, where an error is the reply to the step that it is about: a lease has to be known to be renewed."""
        return unless_failed(await self._settled(steps), but=StoreError)

    async def _settled(self, steps: Sequence[Step]) -> Sequence[Any]:
        replies = await self.send_once(steps)
        if HELD not in replies:
            return replies
        return await self.outlast(steps, replies, self.send_once, self.pause, self.store.stepper.kept)

    async def ask(self, begin: Begin[T]) -> T:
        """Have a talk with the server."""
        raise NotImplementedError

    async def ask_alone(self, begin: Begin[T], introduction: Callable[[], Talk[Server]]) -> T:
        """Have a talk that may take long, on a line of its own."""
        raise NotImplementedError

    async def claim(self, claim: Claim) -> Decision:
        """Decide one claim. The usual answers are found here, because every call pays for a conversation."""
        if claim.may_create:
            (reply,) = await self.send((Add(claim),))
            if type(reply) is Added:
                return decide_claim(None, claim, reply.now, reply.fence - 1)
            if reply is KEPT:
                return BUSY
            record, now = reply
            decision = decide_claim(record, claim, now, 0)
            if decision.record is record:
                return decision
        return await super().claim(claim)

    async def complete(self, completion: Completion) -> Ending:
        """End a claim. The usual answer is found here."""
        if completion.owner and completion.began:
            (reply,) = await self.send((End(completion),))
            if reply is DONE:
                return Ending.DONE
        return await super().complete(completion)

    async def purge(self, limit: int = 256) -> int:
        """Move the hand over ``limit`` rows and forget the expired ones."""
        return await self.ask(lambda _: self.store.stepper.purge(limit))

    async def scan(self, state: State | None = None, after: str = "", limit: int = 256) -> list[Record]:
        """Records in key order. States are not indexed: looking for one may go through the whole table."""
        store = self.store
        return await self.ask_alone(lambda _: store.language.scan(state, after, limit), store.introduce)

    async def now(self) -> float:
        """The server's clock."""
        return await self.ask(lambda _: self.store.language.now())

    async def stats(self) -> StoreStats:
        """Count what is there. The whole table is read for it; nobody has to wait meanwhile."""
        return await self.ask_alone(lambda _: self.store.language.stats(), self.store.introduce)

    async def migrate(self) -> bool:
        """Make the table if it is not there; whether it had to be made. For a user who may."""
        return await self.ask_alone(lambda _: self.store.language.find_table(create=True), self.store.greet)


class MySQLStore(_Verbs):
    """A store in a table of a MySQL (8.0 or newer) or MariaDB (10.5 or newer) database.

    host, port, user, password   where the server is, and as whom to speak to it
    socket      the path of its Unix socket, instead of host and port
    table       the table's name; a database may hold several stores
    create      make the table when it is not there
    timeout     seconds until an unanswered command is StoreUnavailable
    durability  "full": a server that may forget commits when its machine loses power is refused; "server": it is taken
                as it is
    tls         "no"; "yes": encrypted, to whomever it is; "verify": encrypted, and the server's certificate is checked
    tls_ca      the file with the authority to check it by; by default the system's

    What breaks its promises: failing over to a replica that did not get every commit; a server that does not write its
    log with every commit, with durability="server"; setting the server's clock back by more than a record's retention.
    """

    def __init__(
        self,
        database: str,
        *,
        host: str = "localhost",
        port: int = 3306,
        user: str | None = None,
        password: str = "",
        socket: str | None = None,
        table: str = "effectonce_records",
        create: bool = True,
        timeout: float = 5.0,
        durability: Literal["full", "server"] = "full",
        tls: Literal["no", "yes", "verify"] = "no",
        tls_ca: str | None = None,
    ) -> None:
        if not re.fullmatch("[a-z_][a-z0-9_]{0,63}", table):
            raise UsageError(
                f"table={table!r} must be a name of at most 64 characters out of a-z, 0-9 and _."
            )
        if not 0 < timeout < 86_400:
            raise UsageError(f"timeout={timeout!r} must be seconds, more than none and less than a day.")
        if durability not in ("full", "server") or tls not in ("no", "yes", "verify"):
            raise UsageError('durability= must be "full" or "server", and tls= "no", "yes" or "verify".')
        driver("pymysql")
        self.store = self
        self.address = Address(host, port, user, password, database, socket, tls, tls_ca, timeout)
        self.patient_address = self.address._replace(timeout=max(timeout, LOOK_SECONDS))
        self.language = Language(table)
        self.stepper = Stepper(self.language)
        self._patience = max(1, int(timeout))
        self._closed = False
        self._create = create
        self._durable = durability == "full"
        self._is_ready = False
        self._inherited: list[object] = []
        self._start()
        tell_of_forks(self)

    @classmethod
    def from_url(cls, url: str, options: dict[str, str]) -> MySQLStore:
        """``mysql://user:password@host:3306/database`` or ``mariadb://…``, with ``?table=effectonce_records&create=no``
        ``&timeout=5&durability=server&tls=verify&tls_ca=FILE&socket=PATH``.
        """
        known: dict[str, Callable[[str], Any]] = {
            "table": str, "create": {"yes": True, "no": False}.__getitem__, "timeout": float, "durability": str,
            "tls": str, "tls_ca": str, "socket": str,
        }  # fmt: skip
        parts = urlsplit(url)
        database = unquote(parts.path.removeprefix("/"))
        if not database or "/" in database or parts.fragment:
            raise UsageError(
                f"{shown(url)!r} names no database. Write mysql://user:password@host:3306/database, with every / ? # "
                "and @ of the password percent-encoded."
            )
        try:
            chosen = {name: known[name](value) for name, value in options.items()}
            place: dict[str, Any] = {"host": parts.hostname or "localhost", "port": parts.port or 3306}
            if parts.port == 0:
                raise ValueError("no server has it")
        except (KeyError, ValueError):
            raise UsageError(
                f"{shown(url)!r} has a port or an option that is unknown or makes no sense. Known are table=NAME, "
                "create=yes|no, timeout=SECONDS, durability=full|server, tls=no|yes|verify, tls_ca=FILE, socket=PATH."
            ) from None
        user = None if parts.username is None else unquote(parts.username)
        return cls(database, user=user, password=unquote(parts.password or ""), **place, **chosen)

    async def send_once(self, steps: Sequence[Step]) -> Sequence[Any]:
        """Have steps done, on the caller's own thread: alone if a line is free, else with others."""
        for lane in self._lanes:
            if not lane.is_busy():
                with lane.group.lead:
                    reply = lane.at_once(steps[0]) if len(steps) == 1 else None
                    return [reply] if reply is not None else await lane.execute(steps)
        return min(self._lanes, key=_Lane.crowd).submit(steps)

    async def pause(self, seconds: float) -> None:
        """Let time pass, on the caller's own thread."""
        time.sleep(seconds)  # noqa: ASYNC251 — there is no loop here to block

    async def ask(self, begin: Begin[T]) -> T:
        """Have a talk with the server, on the caller's own thread."""
        lane = next((lane for lane in self._lanes if not lane.is_busy()), self._lanes[0])
        with lane.group.lead:
            return await self.carried(lane.lines, begin)

    async def ask_alone(self, begin: Begin[T], introduction: Callable[[], Talk[Server]]) -> T:
        """Have a talk that may take long, on a line of its own."""
        return await self.carried(Lines(open_thread_line, self.patient_address, introduction, most=0), begin)

    def ddl(self) -> str:
        """The statements that ``migrate`` executes on an empty database."""
        return f"{self.language.sql['schema']};\n"

    def for_asyncio(self) -> Store:
        """The same verbs on event loops."""
        driver("asyncmy")
        return _OnLoop(self)

    def close(self) -> None:
        """Hang up. What is on its way is finished first."""
        self._closed = True
        for lane in self._lanes:
            with lane.group.lead:
                lane.lines.hang_up()
        for loop, held in list(self.loops.items()):
            if loop.is_running() and loop is not asyncio._get_running_loop():
                with suppress(RuntimeError):  # it has just ended
                    loop.call_soon_threadsafe(held.lines.hang_up)
            else:
                held.lines.hang_up()

    def before_fork(self) -> None:
        """A fork disturbs nobody here."""

    def after_fork(self, *, in_child: bool) -> None:
        """Leave the parent's lines to the parent. They are kept: closing them would be heard at the other end."""
        if in_child:
            self._inherited += [self._lanes, self.loops]
            self._start()

    def _start(self) -> None:
        self._lanes = [_Lane(self) for _ in range(LINES)]
        self.loops: dict[asyncio.AbstractEventLoop, _Loop] = {}

    # What both colours say and hear.

    async def carried(self, lines: Lines, begin: Begin[T]) -> T:
        """Have a talk, unless the store is closed."""
        self._check_open()
        try:
            return await lines.carry(begin)
        except Refusal as refusal:
            raise self.language.translated(refusal) from refusal
        finally:
            if self._closed:
                lines.hang_up()

    def steps(self, steps: Sequence[Step]) -> Begin[list[Any]]:
        """The talk that has steps done."""
        return lambda server: self.stepper.execute(server, steps, self._patience)

    def introduce(self) -> Talk[Server]:
        """What is said first on a line. The table is looked at once."""
        server = yield from self.greet()
        if not self._is_ready:
            yield from self.language.find_table(self._create)
            self._is_ready = True
        yield from self.language.teach(server)
        return server

    def greet(self) -> Talk[Server]:
        """The same, without the table."""
        return self.language.greet(self._durable)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"The store {self.address.shown} is closed.")


class _Lane:
    """A line for threads, one of them at a time, and those who queue up for it."""

    def __init__(self, store: MySQLStore) -> None:
        self._store = store
        self._waiting: set[int] = set()
        self.lines = Lines(open_thread_line, store.address, store.introduce)
        self.group: Group[Step, Any] = Group(self._execute_now, (Exception,))

    def is_busy(self) -> bool:
        """Whether somebody uses the line, or will: those who wait go together, and nobody alone before them."""
        return self.group.lead.locked() or bool(self._waiting)

    def crowd(self) -> int:
        """How many threads wait here."""
        return len(self._waiting)

    def submit(self, steps: Sequence[Step]) -> list[Any]:
        """Have steps done with the next packet."""
        thread = threading.get_ident()
        self._waiting.add(thread)
        try:
            return self.group.submit(list(steps))
        finally:
            self._waiting.discard(thread)

    def at_once(self, step: Step) -> Any:
        """Have a usual step done; None if it is not as usual. Only who has the lead comes here."""
        try:
            statement = self._store.stepper.at_once(step)
        except (EffectOnceError, UnicodeEncodeError):
            return None
        result = None if statement is None else self.lines.ask_at_once(statement)
        return None if result is None else self._store.stepper.reply(step, result)

    async def execute(self, steps: Sequence[Step]) -> list[Any]:
        """Have steps done. Only who has the lead comes here."""
        return await self._store.carried(self.lines, self._store.steps(steps))

    def _execute_now(self, steps: Sequence[Step]) -> list[Any]:
        return _finished(self.execute(steps))


class _OnLoop(_Verbs):
    """The store for callers on event loops."""

    def __init__(self, store: MySQLStore) -> None:
        self.store = store

    async def send_once(self, steps: Sequence[Step]) -> Sequence[Any]:
        return await self._held().turns.answers(steps)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def ask(self, begin: Begin[T]) -> T:
        return await self.store.carried(self._held().lines, begin)

    async def ask_alone(self, begin: Begin[T], introduction: Callable[[], Talk[Server]]) -> T:
        store = self.store
        return await store.carried(Lines(open_loop_line, store.patient_address, introduction, most=0), begin)

    def close(self) -> None:
        self.store.close()

    def _held(self) -> _Loop:
        """What the running loop has; made when it first asks."""
        loops, loop = self.store.loops, asyncio.get_running_loop()
        held = loops.get(loop)
        if held is None:
            held = loops[loop] = _Loop(self.store)
            for ended in [other for other in list(loops) if other.is_closed()]:
                left = loops.pop(ended, None)  # or another thread was first
                if left is not None:
                    left.lines.hang_up()
        return held


class _Loop:
    """The lines of one event loop, and the turns of its callers."""

    def __init__(self, store: MySQLStore) -> None:
        self._store = store
        self.lines = Lines(self._connect, store.address, store.introduce, LOOP_LINES)
        self.turns: Turns[Step, Any] = Turns(self._execute, LOOP_LINES)
        self._stay: AsyncGenerator[None, None] | None = None

    async def _execute(self, steps: Sequence[Step]) -> list[Any]:
        return await self._store.carried(self.lines, self._store.steps(steps))

    async def _connect(self, address: Address) -> Line:
        if self._stay is None:  # a loop that ends closes every generator that has begun on it
            self._stay = self._until_the_loop_ends()
            await anext(self._stay)
        return await open_loop_line(address)

    async def _until_the_loop_ends(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self.lines.hang_up()


def _finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of the blocking colour, which never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise AssertionError("A blocking line has waited.")
