"""Records in the user's transaction: the steps of the SQL stores, over the user's own connection.

The table is the one that the receiver's store has, so that fenced and atomic calls share their keys. A step is a
statement here too, and the protocol decides between them; nothing is committed, and nobody else sees a record before
the user commits. Whoever claims the same key meanwhile waits in its own INSERT until the engine knows how that went.
"""

from __future__ import annotations

import itertools
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any, Final, Self, cast
from uuid import UUID
from weakref import WeakSet

from .._protocol import decide_claim
from .._records import Claim, Completion, Decision, Ending, Record, State, Verdict
from ..errors import StoreMismatch, StoreUnavailable, UsageError
from ..stores._steps import BUSY, DONE, Add, Added, End, Found, Read, Step, SteppingStore, Swap
from ..stores.base import StoreStats
from .base import LOCK_TIMED_OUT, NO_SUCH_TABLE, Adapter, Result, Values, code_of, gone_or_raised

if TYPE_CHECKING:
    from ..stores.postgres import PostgresStore
    from ..stores.sqlite import SQLiteStore

GRANTED = (Verdict.CLAIMED, Verdict.TAKEN_OVER)
AT_ONCE_MILLISECONDS: Final = 50
"""How long a claim that must not wait does wait for a lock: a claim of another receiver holds one for less."""
MOST_LOOKS: Final = 100


class TransactionStore(SteppingStore):
    """The verbs that a call in a transaction needs."""

    at_once = False
    """Whether a claim is answered BUSY when another transaction has the key, instead of waiting for its end."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter

    def hurried(self) -> Self:
        """The same, but claims don't wait."""
        other = copy(self)
        other.at_once = True
        return other

    async def open(self, claim: Claim, name: str) -> Decision:
        """Claim, and mark where the handler begins by a savepoint if it may."""
        decision = await self.claim(claim)
        if decision.verdict in GRANTED:
            await self.adapter.savepoint(name)
        return decision

    async def close_with(self, completion: Completion, name: str | None) -> Ending:
        """Forget the mark, then end the claim."""
        if name is not None:
            await self.adapter.release(name)
        return await self.complete(completion)

    async def claim(self, claim: Claim) -> Decision:
        """Decide one claim."""
        if self.at_once:
            return await self._claim_at_once(claim)
        return await super().claim(claim)

    async def claim_many(self, claims: Sequence[Claim]) -> list[Decision]:
        """Decide many claims; those that must not wait one by one, so that one that is held spoils no other."""
        if self.at_once:
            return [await self._claim_at_once(claim) for claim in claims]
        return await super().claim_many(claims)

    async def _claim_at_once(self, claim: Claim) -> Decision:
        """Decide a claim without waiting for other transactions for long."""
        raise NotImplementedError

    async def send(self, steps: Sequence[Step]) -> list[Any]:
        """Have steps done, in the order of keys that everybody keeps to."""
        replies = {step.key: await self.do(step) for step in sorted(steps, key=lambda step: step.key)}
        return [replies[step.key] for step in steps]

    async def do(self, step: Step) -> Any:
        """Have one step done."""
        raise NotImplementedError

    async def ask(self, sql: str, values: Values = ()) -> Result:
        """Have a statement done on the records' table."""
        with self.errors():
            return await self.adapter.execute(sql, values)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """What a driver raises means what it says, and goes through as it is; a missing table is explained."""
        try:
            yield
        except Exception as error:
            is_missing = code_of(error) in NO_SUCH_TABLE or "no such table" in str(error)
            if not is_missing:
                raise
            raise StoreMismatch(
                f"This connection sees no table of effectonce's: {error}. Run `effectonce migrate URL` for the "
                "database that the connection is to; inside your transaction nothing is created."
            ) from error

    # What a transaction has no use for

    async def purge(self, limit: int = 256) -> int:
        """Nothing is purged here: the user's transaction is not the place for it."""
        return 0

    async def scan(self, state: State | None = None, after: str = "", limit: int = 256) -> list[Record]:
        """Refused."""
        raise self._elsewhere()

    @abstractmethod
    async def now(self) -> float:
        """The engine's clock."""

    async def stats(self) -> StoreStats:
        """Refused."""
        raise self._elsewhere()

    def _elsewhere(self) -> UsageError:
        return UsageError("Ask the receiver itself; receiver.on(connection) is for calls in a transaction.")


class InSQLite(TransactionStore):
    """Over a connection to the file that the records are in. Only one transaction at a time can have claimed a key.

    Claims that must not wait need nothing special: who has the file's lock has it for all keys.
    """

    def __init__(self, adapter: Adapter, store: SQLiteStore) -> None:
        super().__init__(adapter)
        from ..stores import _sqlite_file, sqlite

        self._rows, self._clock = sqlite, store._clock
        names = ("add", "read", "end", "replace")
        self._add, self._read, self._end, self._replace = (
            _numbered(_sqlite_file.SQL[name]) for name in names
        )

    async def now(self) -> float:
        """The machine's clock."""
        return self._clock()

    async def _claim_at_once(self, claim: Claim) -> Decision:
        return await SteppingStore.claim(self, claim)

    async def do(self, step: Step) -> Any:
        now = self._clock()
        if type(step) is Add:
            key, owner, fingerprint, lease, keep, once, _, _ = step.claim
            until = now + lease
            values = (key, owner, fingerprint or None, until, until + keep, int(once))
            added = (await self.ask(self._add, values)).rows
            return Added(added[0][0], now) if added else await self._found(key, now)
        if type(step) is End:
            key, owner, fence, state, result, keep, _ = step.completion
            done = await self.ask(self._end, (key, owner, fence, int(state), result, now + keep))
            return DONE if done.changed else await self._found(key, now)
        if type(step) is Swap:
            before, after = step
            same = (before.fence, int(before.state), before.owner or None, before.lease_until or None)
            row = [int(each) if isinstance(each, bool | State) else each for each in self._rows._row(after)]
            return (await self.ask(self._replace, (*row, *same))).changed == 1
        return await self._found(step.key, now)

    async def _found(self, key: str, now: float) -> Found:
        rows = (await self.ask(self._read, (key,))).rows
        return Found(self._rows._from_row(key, rows[0]) if rows else None, now)


_EXPECT_KNOWN: WeakSet[Any] = WeakSet()
"""Stores whose last claim in a transaction was for a known key: the next one probably is, too."""


class InPostgres(TransactionStore):
    """Over a connection to the database that the table is in. Steps of a kind are the rows of one statement."""

    def __init__(self, adapter: Adapter, store: PostgresStore) -> None:
        super().__init__(adapter)
        from ..stores import _postgres_steps

        self._store, self._sql, self._steps = store, store._table.sql, _postgres_steps

    async def now(self) -> float:
        """The server's clock."""
        return cast("float", (await self.ask(self._sql.one["now"].text)).rows[0][0])

    async def open(self, claim: Claim, name: str) -> Decision:
        """Claim and mark: in one round trip where the driver can, if the last claim was for a new key too."""
        if self.at_once or not claim.may_create or not self.adapter.pipelines:
            return await super().open(claim, name)
        if self._store in _EXPECT_KNOWN:
            decision = await super().open(claim, name)
            if decision.verdict in GRANTED:
                _EXPECT_KNOWN.discard(self._store)
            return decision
        add, values = self._sql.one["add"], self._steps.add_values(claim)
        with self.errors():
            added, _ = await self._together((add, values), (f"SAVEPOINT {name}", ()))
        decision = await self._decided(claim, self._steps._added_or_found(claim.key, added.rows[0]))
        if decision.verdict not in GRANTED:
            _EXPECT_KNOWN.add(self._store)
            await self.adapter.release(name)
        return decision

    async def _decided(self, claim: Claim, reply: Any) -> Decision:
        """The answer to a claim by the reply to its first step; rarely there is more to say."""
        if type(reply) is Added:
            return decide_claim(None, claim, reply.now, reply.fence - 1)
        if type(reply) is Found:
            decision = decide_claim(reply.record, claim, reply.now, 0)
            if decision.record is reply.record:
                return decision
        return await self.claim(claim)

    async def close_with(self, completion: Completion, name: str | None) -> Ending:
        """Forget the mark and end the claim, likewise."""
        if name is None or not self.adapter.pipelines:
            return await super().close_with(completion, name)
        end, values = self._sql.one["end"], self._steps.end_values(completion)
        with gone_or_raised():
            _, ended = await self._together((f"RELEASE SAVEPOINT {name}", ()), (end, values))
        return Ending.DONE if ended.rows else await self.complete(completion)

    async def _together(self, *calls: tuple[Any, Values]) -> list[Result]:
        """Have a statement and a command done in one round trip."""
        if self.adapter.may_talk():
            return await self.adapter.talk(calls)
        return await self.adapter.execute_all(
            [
                (call, ()) if isinstance(call, str) else (call.text, _sendable(values))
                for call, values in calls
            ]
        )

    async def send(self, steps: Sequence[Step]) -> list[Any]:
        """Have steps done. Who has waited in vain, because another transaction was first, has to look again."""
        again, look, grouped = self._steps.AGAIN, self._steps.LOOK, self._steps.grouped
        steps, replies = list(steps), [again] * len(steps)
        looks = iter(range(MOST_LOOKS))
        while places := [place for place, reply in enumerate(replies) if reply is again or reply is look]:
            if next(looks, None) is None:
                raise StoreUnavailable("Other transactions were always first. Run this one again.")
            for place in places:
                if replies[place] is look:
                    steps[place] = Read(steps[place].key)
            for group in grouped(steps, places):
                with self.errors():
                    (done,) = await self._together(group.call(self._sql, steps))
                group.settle(done.rows, steps, replies)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    async def _claim_at_once(self, claim: Claim) -> Decision:
        """A time-out for locks, for this claim alone, in a savepoint: it must not cost the transaction."""
        adapter, name = self.adapter, self.adapter.new_name()
        await adapter.savepoint(name)
        limit = "SELECT current_setting('lock_timeout'), set_config('lock_timeout', $1::text, true)"
        ((before, _),) = (await adapter.execute(limit, (f"{AT_ONCE_MILLISECONDS}ms",))).rows
        try:
            decision = await SteppingStore.claim(self, claim)
        except Exception as error:
            if code_of(error) not in LOCK_TIMED_OUT:
                raise
            await adapter.roll_back_to(name)
            return BUSY
        await adapter.execute(limit, (before,))
        await adapter.release(name)
        return decision


def _numbered(sql: str) -> str:
    """A statement of the SQLite store with the parameters that adapters know."""
    count = itertools.count(1)
    return re.sub(r"\?(\d*)", lambda found: f"${found[1] or next(count)}", sql)


def _sendable(values: Values) -> list[Any]:
    """Values for any driver. A record's id, which comes first, is a uuid: as text everybody can send it."""
    first, *rest = values
    ids = [str(UUID(bytes=each)) for each in first] if isinstance(first, tuple) else str(UUID(bytes=first))
    return [ids, *(_plain(each) for each in rest)]


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, State) else value
