"""Records in a PostgreSQL table: every step is one statement, and many steps share one.

The server's clock decides. A new key costs two statements, a duplicate one that writes nothing, and a batch no more
than that: steps of a kind are the rows of one statement. Threads hold connections with prepared statements; callers on
an event loop share a few (``_turns``), so that whatever comes in one turn of the loop is one round trip.

Records are found by a digest of their key, and by nothing else. The end of an attempt changes its row where it is, and
a hand walks through the table's pages, a few with every few new claims, and forgets what has expired there.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from math import inf
from typing import Any, cast
from urllib.parse import unquote_plus

from .._durations import Duration
from .._durations import seconds as seconds_of
from .._fork import tell_of_forks
from .._protocol import decide_claim
from .._records import Claim, Completion, Decision, Ending, Record
from ..errors import EffectOnceError, MissingExtra, UsageError
from ._postgres_crowds import LANES, OnLoops, name_of
from ._postgres_rotation import RotatingTable
from ._postgres_sql import Answer, Lost, Refusal, Wires
from ._postgres_steps import MICROS, add_encoded, end_encoded, latest, record_of
from ._postgres_table import LOCKED, Table
from ._postgres_verbs import Verbs
from ._steps import HELD, Found, Step, claiming
from ._urls import shown
from .base import Store


class PostgresStore(Verbs):
    """A store in a table of the database that ``url`` names; whatever libpq understands may stand in it.

    table       the table's name
    schema      the schema it is in, if not the first of the search path
    pool        how many connections blocking callers may hold at once; an event loop has a few of its own
    timeout     how many seconds a command may take before StoreUnavailable
    create      whether the table is made when it is missing; if not, ``effectonce migrate`` makes it
    prepare     whether statements are prepared: not behind a pooler that lends connections for a transaction
    durability  "full": a server that may forget commits when it crashes is refused; "server": it is taken as it is
    driver      what speaks for callers on an event loop: "psycopg" or "asyncpg"
    rotate      for very many keys: how often the table turns to its next slot, to forget by emptying slots instead of
                deleting rows; half of what is usually kept is a good choice. To be said from the table's first day on

    What breaks its promises: failing over to a standby that did not get every commit; a server that does not write its
    log with every commit, with durability="server"; setting the server's clock back by more than a record's retention.
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
        durability: str = "full",
        driver: str = "psycopg",
        rotate: Duration | None = None,
    ) -> None:
        for option, name in (("table", table), ("schema", schema)):
            if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,57}", name):
                raise UsageError(f"{option}={name!r} must be letters, digits and _, at most 58 of them.")
        if pool < 1 or not 0 < timeout < inf:
            raise UsageError(f"pool={pool} and timeout={timeout} must be above zero.")
        if durability not in ("full", "server"):
            raise UsageError(f'durability={durability!r} must be "full" or "server".')
        if driver not in ("psycopg", "asyncpg"):
            raise UsageError(f'driver={driver!r} must be "psycopg" or "asyncpg".')
        name = f'"{table}"' if schema is None else f'"{schema}"."{table}"'
        place = (url, name, timeout, create, durability == "full")
        super().__init__(
            Table(*place) if rotate is None else RotatingTable(*place, period=seconds_of(rotate, "rotate"))
        )
        threads, loops = _module("threads"), _module("loops" if driver == "psycopg" else "asyncpg")
        dial = threads.dialler(url, timeout, prepare)
        self._wires = threads.ThreadWires(dial, prepare, timeout, pool)
        self._ears = _module("ears").Ears(dial, self._table.sql.channel) if prepare else None
        dial_beside = loops.dialler(url, timeout, prepare)
        self._on_loops = OnLoops(
            self._table, self._ears, lambda: loops.LoopWires(dial_beside, prepare, timeout, LANES + 1)
        )
        self._add, self._end = self._table.quick.one["add"], self._table.quick.one["end"]
        tell_of_forks(self)

    @classmethod
    def from_url(cls, url: str, options: dict[str, str]) -> PostgresStore:
        """``postgresql://user:password@host/database?table=effects&pool=16&timeout=5&create=no&prepare=no``.

        With ``postgresql+asyncpg://`` callers on an event loop are served by asyncpg.
        """
        yes_or_no = {"yes": True, "no": False}.__getitem__
        known: dict[str, Callable[[str], Any]] = {
            "table": str, "schema": str, "pool": int, "timeout": float, "create": yes_or_no, "prepare": yes_or_no,
            "durability": str, "rotate": str,
        }  # fmt: skip
        try:
            chosen = {name: known[name](value) for name, value in options.items() if name in known}
        except (KeyError, ValueError):
            raise UsageError(
                f"{shown(url)!r} has an option that makes no sense. Known are table=NAME, schema=NAME, pool=NUMBER, "
                "timeout=SECONDS, create=yes|no, prepare=yes|no, durability=full|server, rotate=DURATION, and whatever "
                "libpq knows."
            ) from None
        plain, _, query = url.partition("?")
        pairs = [pair for pair in query.split("&") if unquote_plus(pair.partition("=")[0]) not in known]
        scheme, _, place = plain.partition("://")
        dialect, _, driver = scheme.partition("+")
        return cls(f"{dialect}://{place}?{'&'.join(pairs)}".rstrip("?"), driver=driver or "psycopg", **chosen)

    def ddl(self) -> str:
        """The statements that ``migrate`` executes on an empty database."""
        return "".join(f"{statement};\n" for statement in self._table.sql.schema)

    def wires(self) -> Wires:
        """Connections for threads."""
        return cast("Wires", self._wires)

    async def send_once(self, steps: Sequence[Step]) -> Sequence[Any]:
        """Have steps done in one round trip, on the caller's own thread."""
        return await self.execute(steps)

    async def pause(self, seconds: float) -> None:
        """Let time pass, on the caller's own thread."""
        time.sleep(seconds)  # noqa: ASYNC251 — there is no loop here to block

    async def claim(self, claim: Claim) -> Decision:
        """Decide one claim. A new key and a finished one are written out here, since every call pays for each step."""
        if not (claim.may_create and self._table.ready) or self._table.kept:
            return await super().claim(claim)
        try:
            answer = self._wires.run_one(self._add, add_encoded(claim))
        except Lost as lost:
            raise self._table.unreachable(lost) from lost
        except UnicodeError:
            answer = None
        if type(answer) is Refusal and answer.code == LOCKED:
            return await self.claim_held(claim, HELD)
        if type(answer) is list:
            row = answer[0] if len(answer) == 1 else latest(answer)
            fence = row[2]
            if row[1] is not None:
                record = record_of(claim.key, row)
                decision = decide_claim(record, claim, row[7], 0)
                if decision.record is record:
                    return decision
                return await self.go_on(claiming(claim), Found(record, row[7]))
            if fence is not None:
                self.count(1)
                return decide_claim(None, claim, fence / MICROS, fence - 1)
        return await super().claim(claim)

    async def complete(self, completion: Completion) -> Ending:
        """End a claim; the untroubled end is written out here too."""
        if completion.owner and completion.began and self._table.ready:
            try:
                answer = self._wires.run_one(self._end, end_encoded(completion))
            except Lost as lost:
                raise self._table.unreachable(lost) from lost
            if answer and type(answer) is list:
                return Ending.DONE
        return await super().complete(completion)

    async def watch(self, record: Record, seconds: float) -> bool:
        """Wait to be told of a record's end, on a connection that is there for all who wait."""
        if self._ears is None:
            return False
        told: list[bool] = []
        word = threading.Event()

        def wake(heard: bool) -> None:
            told.append(heard)
            word.set()

        with self._ears.listening(name_of(record), wake):
            if not self._ears.hears(seconds):
                return False
            if await self.mark(record):
                word.wait(seconds)
        return told != [False]

    def purge_aside(self, rows: int) -> bool:
        """Let the hand pass some rows on a connection that nobody needs just now."""
        call = self._table.chore(rows)
        if call is None:
            return True

        def then(answers: Sequence[Answer]) -> None:
            if not isinstance(answers[0], Refusal):
                self._table.passed(call, answers[0][0])

        try:
            return bool(self._wires.run_aside([call], then))
        except (Lost, EffectOnceError):  # nobody asked for it
            return True

    def for_asyncio(self) -> Store:
        """The same verbs for callers on event loops."""
        return self._on_loops

    def close(self) -> None:
        """Close all connections. What is on its way is finished first."""
        self._wires.close()
        self._on_loops.close()
        if self._ears is not None:
            self._ears.close()

    def before_fork(self) -> None:
        """Nothing to bring to rest: a child opens connections of its own."""

    def after_fork(self, *, in_child: bool) -> None:
        """The parent's connections are not the child's."""
        if in_child:
            self._wires.forget()
            self._on_loops.forget()
            if self._ears is not None:
                self._ears.forget()


def _module(name: str) -> Any:
    """A module that needs a driver."""
    driver = "asyncpg" if name == "asyncpg" else "psycopg"
    try:
        return import_module(f"._postgres_{name}", __package__)
    except ImportError as error:
        extra = "asyncpg" if name == "asyncpg" else "postgres"
        raise MissingExtra(
            f"A PostgreSQL store needs {driver}, which can't be imported: {error}. Install effectonce[{extra}]."
        ) from error
