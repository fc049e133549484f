"""Sessions in two tables beside a MySQL or MariaDB store's: a transaction of two packets for each verb.

The first packet locks the session and reads the request, the second writes what the rules say, and commits. A talk is a
generator and a desk has coroutines, so that the one drives the other: what a desk awaits is what the talk says next.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Final, cast

from .._records import Record
from ..errors import StoreMismatch
from ..stores._mysql_sql import DEADLOCK, LOCKED, Refusal, Result, Talk, binary, double
from ..stores.base import Features, Store, StoreStats
from ..stores.mysql import MySQLStore
from ._rules import Session, parts_of
from ._sql import NEIGHBOURS, STATES, Tables, columns_of, named, record_of
from ._store import DeskStore, Sight

NO_SUCH_TABLE: Final = 1146
TRIES: Final = 5
"""How often a transaction is begun anew that a deadlock has ended."""


class _Said:
    """One packet, as a desk awaits it."""

    def __init__(self, statements: list[str]) -> None:
        self._statements = statements

    def __await__(self) -> Generator[list[str], list[Result], list[Result]]:
        return (yield self._statements)


class TalkDesk:
    """A desk in a talk. What is written is said at the end, with the commit."""

    def __init__(self, tables: Tables) -> None:
        self._sql = tables.sql.of
        self._now = 0.0
        self.later: list[str] = []

    async def look(self, session: str, key: str | None = None) -> Sight:
        """Begin, lock a session and read it, and one of its requests."""
        asked = ["START TRANSACTION", self._text("session", session)]
        if key is not None:
            asked.append(self._text("request", session, parts_of(key)[1]))
        _, found, *rest, clock = await _Said([*asked, self._text("clock")])
        self._now = float(clock.rows[0][0])
        if not found.rows:
            return Sight(None, None, self._now)
        epoch, low, lease, until, _ = found.rows[0]
        rows = rest[0].rows if rest else []
        record = record_of(key, _typed(rows[0])) if rows and key is not None else None
        return Sight(Session(session, int(epoch), int(low), float(lease), float(until)), record, self._now)

    async def write(self, session: Session, is_new: bool, drops: bool) -> None:
        """Write a session; a new one looks whether the leases of some others are over."""
        if is_new:
            await self.collect(session.id, NEIGHBOURS)
        self._say("new_session" if is_new else "change_session", *session)
        if drops:
            self._say("drop_below", session.id, session.low, self._now)

    async def put(self, session: str, number: int, record: Record, is_new: bool) -> None:
        """Write a request."""
        self._say("new_request" if is_new else "change_request", session, number, *columns_of(record))

    async def drop(self, session: str, number: int | None = None) -> None:
        """Forget a request, or a session with all of them."""
        if number is not None:
            self._say("drop_request", session, number)
        else:
            self._say("drop_session", session)
            self._say("drop_requests", session)

    async def collect(self, after: str, limit: int) -> int:
        """Look at some sessions that follow an id and forget those whose lease is over."""
        if not self._now:
            await self.look(after)
        (found,) = await _Said([self._text("neighbours", after, limit, self._now)])
        gone = 0
        for (name,) in found.rows:
            (ended,) = await _Said([self._text("collect", name.decode(), self._now)])
            if ended.changed:
                self._say("drop_requests", name.decode())
                gone += 1
        return gone

    async def count(self) -> dict[str, int]:
        """How many requests there are of each state."""
        _, found = await _Said(["START TRANSACTION", self._text("census")])
        return {STATES[int(state)].name: int(count) for state, count in found.rows}

    def _say(self, name: str, *values: Any) -> None:
        self.later.append(self._text(name, *values))

    def _text(self, name: str, *values: Any) -> str:
        """A statement with its values. None of them can be taken for SQL."""
        return re.sub(r"\$(\d+)", lambda found: _literal(values[int(found[1]) - 1]), self._sql[name])


class MySQLSessions(DeskStore):
    """The sessions beside the records of a MySQL or MariaDB store."""

    features = Features()

    def __init__(self, store: MySQLStore, verbs: Any, made: list[bool]) -> None:
        self._store, self._verbs, self._made = store, verbs, made
        names = (f"`{store.language.table}_sessions`", f"`{store.language.table}_requests`")
        self.tables = Tables("mysql", named("mysql", *names))

    @classmethod
    def beside(cls, store: MySQLStore) -> MySQLSessions:
        """The sessions in the database of a store's table. Their tables are made when they are first used."""
        return cls(store, store, [])

    async def at_desk(self, work: Any) -> Any:
        if not self._made:
            if self._store._create:
                await self._verbs.ask(lambda _: self._create())
            self._made.append(True)
        return await self._verbs.ask(lambda _: self._talk(work))

    def _create(self) -> Talk[None]:
        try:
            yield self.tables.sql.schema
        except Refusal as refusal:
            raise StoreMismatch(
                f"The tables of sessions can't be created: {refusal} (error {refusal.code}). Have somebody who may run "
                "the statements of `Sessions.ddl()`."
            ) from refusal

    def _talk(self, work: Callable[[TalkDesk], Coroutine[Any, Any, Any]]) -> Talk[Any]:
        """One transaction, begun anew after a deadlock: it has done nothing then."""
        for tries in range(TRIES, 0, -1):
            desk = TalkDesk(self.tables)
            try:
                answer = yield from _driven(work(desk))
                yield [*desk.later, "COMMIT"]
            except Refusal as refusal:
                yield ["ROLLBACK"]
                if refusal.code == NO_SUCH_TABLE:
                    raise StoreMismatch(
                        f"{refusal}: sessions have two tables beside the records. Have somebody who may create them "
                        "run the statements of `Sessions.ddl()`."
                    ) from refusal
                if tries == 1 or refusal.code not in (DEADLOCK, LOCKED):
                    raise
            else:
                return answer
        raise AssertionError("unreachable")

    async def purge(self, limit: int = 256) -> int:
        """Look at ``limit`` sessions and forget those whose lease is over."""
        return cast("int", await self.at_desk(lambda desk: desk.collect(secrets.token_hex(16), limit)))

    async def now(self) -> float:
        """The server's clock."""
        return cast("float", await self._verbs.now())

    async def stats(self) -> StoreStats:
        """Count the requests that are remembered."""
        by_state = cast("dict[str, int]", await self.at_desk(lambda desk: desk.count()))
        return StoreStats(keys=sum(by_state.values()), bytes=0, by_state=by_state)

    def for_asyncio(self) -> Store:
        """The same on event loops."""
        return MySQLSessions(self._store, self._store.for_asyncio(), self._made)


def _driven(work: Coroutine[Any, Any, Any]) -> Talk[Any]:
    """Have a desk's coroutine say what it says, and hear what the server answers."""
    try:
        said = work.send(None)
        while True:
            said = work.send((yield said))
    except StopIteration as done:
        return done.value
    finally:
        work.close()


def _literal(value: Any) -> str:
    if value is None or isinstance(value, bytes):
        return binary(value)
    if isinstance(value, str):
        return f"CONVERT(X'{value.encode().hex()}' USING ascii)" if value else "''"
    return double(value) if isinstance(value, float) else str(int(value))


def _typed(row: Sequence[Any]) -> tuple[Any, ...]:
    """A request's row as other drivers give it."""
    state, owner, fence, fingerprint, until, attempts, result, once = row
    lease_until = None if until is None else float(until)
    return int(state), owner, int(fence), fingerprint, lease_until, int(attempts), result, int(once)
