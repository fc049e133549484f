"""A desk in an SQL database: every look and every write is a statement inside one transaction, whoever owns that."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import inf
from typing import Any, Final, NamedTuple

from .._records import NOBODY, Record, State, make
from ..errors import StoreMismatch
from ..stores._named import statements
from ..transactions.base import Adapter, Dialect, Statement
from ._rules import Session, parts_of
from ._store import Sight

NEIGHBOURS: Final = 8
"""How many sessions a new one looks at: more than it adds, so that traffic alone keeps them bounded."""
STATES: Final = {int(state): state for state in State}
CLOCKS: Final = {
    "sqlite": "0.0",  # the store's own, which is the machine's
    "postgresql": "date_part('epoch', clock_timestamp())",
    "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6",
}


class Named:
    """The statements of one pair of tables."""

    def __init__(self, dialect: Dialect, sessions: str, requests: str) -> None:
        places = {
            "{sessions}": sessions,
            "{requests}": requests,
            "{clock}": CLOCKS[dialect],
            "{lock}": "" if dialect == "sqlite" else "FOR UPDATE",
            "{current}": "FOR UPDATE" if dialect == "mysql" else "",
        }
        named = statements("common.sql", __file__) | statements(f"{dialect}.sql", __file__)
        for place, name in places.items():
            named = {key: text.replace(place, name) for key, text in named.items()}
        self.schema = [part for part in _bare(named.pop("schema")).split(";") if part.strip()]
        self.of = {key: _bare(text) for key, text in named.items()}


def _bare(text: str) -> str:
    """A statement without comments, also those that stand before the next one."""
    lines = [line for line in text.splitlines() if not line.startswith("--")]
    return "\n".join(lines).strip().rstrip(";")


@lru_cache(maxsize=64)
def named(dialect: Dialect, sessions: str, requests: str) -> Named:
    """The statements of a pair of tables, read once."""
    return Named(dialect, sessions, requests)


class Tables(NamedTuple):
    """Where the sessions of an SQL store are, for whoever has a connection of their own to it."""

    dialect: Dialect
    sql: Named
    clock: Callable[[], float] | None = None
    """The store's clock, where the engine has none."""


class SqlDesk:
    """Over a connection that is in a transaction."""

    def __init__(self, adapter: Adapter, tables: Tables) -> None:
        self._adapter, self._sql, self._clock = adapter, tables.sql.of, tables.clock
        self._now = 0.0

    async def look(self, session: str, key: str | None = None) -> Sight:
        """Read a session, which nobody else can change then, and a request as it is after that."""
        asked: list[Statement] = [(self._sql["session"], (session,))]
        if key is not None:
            asked.append((self._sql["request"], (session, parts_of(key)[1])))
        found, *rest = await self._adapter.execute_all(asked)
        if not found.rows:
            self._now = self._clock() if self._clock else await self.now()
            return Sight(None, None, self._now)
        epoch, low, lease, until, now = found.rows[0]
        self._now = self._clock() if self._clock else float(now)
        rows = rest[0].rows if rest else []
        record = record_of(key, rows[0]) if rows and key is not None else None
        return Sight(Session(session, epoch, low, float(lease), float(until)), record, self._now)

    async def now(self) -> float:
        """The engine's clock."""
        return float((await self._adapter.execute(self._sql["clock"])).rows[0][0])

    async def write(self, session: Session, is_new: bool, drops: bool) -> None:
        """Write a session; a new one looks whether the leases of some others are over."""
        if is_new:
            await self.collect(session.id, NEIGHBOURS)
        name = "new_session" if is_new else "change_session"
        written: list[Statement] = [(self._sql[name], tuple(session))]
        if drops:
            written.append((self._sql["drop_below"], (session.id, session.low, self._now)))
        await self._adapter.execute_all(written)

    async def put(self, session: str, number: int, record: Record, is_new: bool) -> None:
        """Write a request."""
        name = "new_request" if is_new else "change_request"
        await self._adapter.execute(self._sql[name], (session, number, *columns_of(record)))

    async def drop(self, session: str, number: int | None = None) -> None:
        """Forget a request, or a session with all of them."""
        if number is not None:
            await self._adapter.execute(self._sql["drop_request"], (session, number))
        else:
            both = ((self._sql["drop_session"], (session,)), (self._sql["drop_requests"], (session,)))
            await self._adapter.execute_all(both)

    async def collect(self, after: str, limit: int) -> int:
        """Look at some sessions that follow an id and forget those whose lease is over."""
        now = self._clock() if self._clock else self._now or await self.now()
        gone = 0
        for (name,) in (await self._adapter.execute(self._sql["neighbours"], (after, limit, now))).rows:
            if (await self._adapter.execute(self._sql["collect"], (name, now))).changed:
                await self._adapter.execute(self._sql["drop_requests"], (name,))
                gone += 1
        return gone


def columns_of(record: Record) -> tuple[Any, ...]:
    """A request as a row, from its state on. What is empty is NULL."""
    return (
        int(record.state), record.owner or None, record.fence, record.fingerprint or None, record.lease_until or None,
        record.attempts, record.result, int(record.once),
    )  # fmt: skip


def record_of(key: str, row: tuple[Any, ...]) -> Record:
    """The request that a row holds. It never expires: it leaves by the mark, or with its session."""
    state, owner, fence, fingerprint, lease_until, attempts, result, once = row
    if state not in STATES:
        raise StoreMismatch(
            f"A request is in state {state}, which this effectonce does not know. Use a newer one."
        )
    fields = (
        key, STATES[state], owner or NOBODY, fence, fingerprint or b"", lease_until or 0.0, attempts, result, inf,
        bool(once),
    )  # fmt: skip
    return make(Record, fields)
