"""Records in the user's transaction: the steps of the SQL stores, over the user's own connection.

The table is the one that the receiver's store has, so that fenced and atomic calls share their keys. A step is a
statement here too, and the protocol decides between them; nothing is committed, and nobody else sees a record before
the user commits. Whoever claims the same key meanwhile waits in its own INSERT until the engine knows how that went.
"""

from __future__ import annotations

import itertools
import re
from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

from .._blocking import run
from .._records import Claim, Completion, Decision, Ending, Record, State, Verdict
from ..errors import StoreError, StoreMismatch, UsageError
from ..stores import Store
from ..stores._steps import DONE, Add, Added, End, Found, Step, SteppingStore, Swap
from ..stores.base import StoreStats
from .base import Adapter, Result, Statement, Values, is_missing_table

if TYPE_CHECKING:
    from ..stores.sqlite import SQLiteStore

GRANTED = (Verdict.CLAIMED, Verdict.TAKEN_OVER)

_SEEN: WeakSet[Store] = WeakSet()
"""Stores whose table a connection of the user's has seen."""


class Explained:
    """What a driver raises means what it says, and goes through as it is; what is about the table or a key is
    explained.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.explain(error)

    def explain(self, error: Exception) -> None:
        """Raise what explains an error, if it has to be."""
        if is_missing_table(error):
            raise StoreMismatch(
                f"This connection sees no table of effectonce's: {error}. Run `effectonce migrate URL` for the "
                "database that the connection is to; inside your transaction nothing is created."
            ) from error
        if isinstance(error, UnicodeEncodeError):
            raise UsageError(
                f"This connection's client_encoding has no {error.object[error.start : error.end]!r}, which is in a "
                "key. Nothing was claimed. Connect with client_encoding=UTF8, as drivers do by default."
            ) from error


class TransactionStore(SteppingStore):
    """The verbs that a call in a transaction needs."""

    at_once = False
    """Whether a claim is answered BUSY when another transaction has the key, instead of waiting for its end."""

    errors = Explained()
    own: Store
    """The receiver's own, which is beside the user's connection."""
    look: Statement | None = None
    """Looks for the table. None: it has been seen, or was made when the store was opened."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter

    async def make_sure(self) -> None:
        """Before the first claim of all: have the receiver's store make its table if there is none, as its own first
        command would. It does so over a connection of its own; in the user's transaction nothing is created.
        """
        if self.look is None or self.own in _SEEN:
            return
        rows = (await self.adapter.execute(*self.look)).rows
        if not rows:
            try:
                await self._have_it_made()
            except StoreError as error:
                raise StoreMismatch(
                    f"This connection sees no table of effectonce's, and the receiver could not make it: {error} "
                    "`effectonce migrate URL` makes it beforehand."
                ) from error
        self.seen(rows)
        _SEEN.add(self.own)

    def seen(self, rows: Sequence[Values]) -> None:
        """What ``look`` has found; nothing, if the table had to be made."""

    async def _have_it_made(self) -> None:
        if not self.adapter.awaits:
            await self.own.now()
            return
        from asyncio import to_thread  # a connection for this loop would be there for nothing else

        await to_thread(lambda: run(self.own.now()))

    def hurried(self) -> Self:
        """The same, but claims don't wait."""
        other = copy(self)
        other.at_once = True
        return other

    async def open(self, claim: Claim, name: str | None) -> Decision:
        """Claim, and mark where the handler begins by a savepoint, if it may and a name is given."""
        decision = await self.claim(claim)
        if name is not None and decision.verdict in GRANTED:
            await self.adapter.savepoint(name)
        return decision

    async def close_with(self, completion: Completion, name: str | None) -> Ending:
        """End the claim, then forget the mark: until it is gone, effect and result can be undone together."""
        ending = await self.complete(completion)
        if name is not None:
            await self.adapter.release(name)
        return ending

    # A transaction that is a call's own

    async def begin_with(self, claim: Claim, name: str | None) -> Decision:
        """Begin a transaction, unless it has begun, and ``open``."""
        await self.begin()
        return await self.open(claim, name)

    async def commit_with(self, completion: Completion, name: str | None) -> Ending:
        """``close_with``, and commit. Nothing is committed if there is no claim to end."""
        ending = await self.close_with(completion, name)
        if ending is not Ending.FENCED:
            await self.adapter.commit()
        return ending

    async def begin(self) -> None:
        """Begin, unless that was done."""
        if self.adapter.is_idle():
            await self.adapter.begin()

    async def commit(self) -> None:
        """Commit, unless that was done."""
        if not self.adapter.is_idle():
            await self.adapter.commit()

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
        with self.errors:
            return await self.adapter.execute(sql, values)

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
        from ..stores import _sqlite_file, _sqlite_rows

        self._rows, self._clock = _sqlite_rows, store._clock
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
            row = [int(each) if isinstance(each, bool | State) else each for each in self._rows.row_of(after)]
            return (await self.ask(self._replace, (*row, *same))).changed == 1
        return await self._found(step.key, now)

    async def _found(self, key: str, now: float) -> Found:
        rows = (await self.ask(self._read, (key,))).rows
        return Found(self._rows.from_row(key, rows[0]) if rows else None, now)


def _numbered(sql: str) -> str:
    """A statement of the SQLite store with the parameters that adapters know."""
    count = itertools.count(1)
    return re.sub(r"\?(\d*)", lambda found: f"${found[1] or next(count)}", sql)
