"""PostgreSQL's records in the user's transaction: what goes together goes in one round trip where the driver can."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast
from uuid import UUID
from weakref import WeakKeyDictionary

from .._protocol import decide_claim
from .._records import Claim, Completion, Decision, Ending, State
from ..errors import StoreUnavailable
from ..stores._postgres_sql import Statement, Statements
from ..stores._postgres_steps import (
    AGAIN,
    LOOK,
    MICROS,
    add_encoded,
    added_or_found,
    encoded,
    end_encoded,
    found,
    grouped,
    id_of,
    latest,
    values_of,
)  # fmt: skip
from ..stores._steps import BUSY, Found, Read, Step, SteppingStore
from ._stores import GRANTED, TransactionStore
from .base import GONE_OR_RAISED, LOCK_TIMED_OUT, Adapter, Result, Values, code_of

if TYPE_CHECKING:
    from ..stores.postgres import PostgresStore

MERGES: Final = 15
"""The first version that has MERGE."""
NOTHING_TO_END: Final = {"23502", "23514"}
"""What `settle_one` fails with where there is nothing to settle, so that what follows it is not done."""
COMMIT: Final = Statement("effectonce_commit", "COMMIT")
AT_ONCE_MILLISECONDS: Final = 50
"""How long a claim that must not wait does wait for a lock: a claim of another receiver holds one for less."""
MOST_LOOKS: Final = 100

_HOMES: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The schema that a user's connection has seen a store's table in, when the store itself had not looked yet."""


class InPostgres(TransactionStore):
    """Over a connection to the database that the table is in. Steps of a kind are the rows of one statement."""

    def __init__(self, adapter: Adapter, store: PostgresStore) -> None:
        super().__init__(adapter)
        self._store, self._table = store, store._table
        self._sql = self._at_home()
        if not store._table.ready:
            self.own, self.look = store, (self._sql.one["look"].text, ())

    def _at_home(self) -> Statements:
        """The statements with the table's schema in them: the user's search_path may lead to another such table."""
        table = self._table
        home = table.home or _HOMES.get(self._store)
        if home is None or "." in table.name:
            return table.sql
        return _statements(f"{home}.{table.name}", table.rotates)

    def seen(self, rows: Sequence[Values]) -> None:
        if rows and not self._table.ready:
            home, comment, begins_only = map(_text, rows[0])
            self._table.check_kind(comment)
            self._table.check_rights(begins_only)
            _HOMES[self._store] = home
        self._sql = self._at_home()

    async def now(self) -> float:
        """The server's clock."""
        return cast("float", (await self.ask(self._sql.one["now"].text)).rows[0][0])

    async def open(self, claim: Claim, name: str | None) -> Decision:
        """Claim and mark: in one round trip where the driver can, if the last claim was for a new key too."""
        if self.at_once or not claim.may_create or not self.adapter.pipelines or name is None:
            return await super().open(claim, name)
        if self._table.expects_known:
            decision = await super().open(claim, name)
            self._table.expects_known = decision.verdict not in GRANTED
            return decision
        with self.errors:
            done, _ = await self._together(("put", claim), (f"SAVEPOINT {name}", None))
        return await self._put(claim, name, done.rows)

    async def begin_with(self, claim: Claim, name: str | None) -> Decision:
        """The same with BEGIN before it. A key that is probably known needs no transaction, if it is.

        Written out, since every call pays for it.
        """
        begin = self.adapter.opening()
        if begin is None or self.at_once or not claim.may_create:
            return await super().begin_with(claim, name)
        if self._table.expects_known:
            known = await self._look(claim)
            if known is not None:
                return known
            self._table.expects_known = False
        calls: list[Any] = [(begin, ()), (self._sql.one["put"], add_encoded(claim))]
        if name is not None:
            calls.append((f"SAVEPOINT {name}", ()))
        try:
            done = (await self.adapter.talk(calls))[1]
        except Exception as error:
            self.errors.explain(error)
            raise
        return await self._put(claim, name, done.rows)

    async def _put(self, claim: Claim, name: str | None, rows: Sequence[Values]) -> Decision:
        """The answer to a claim, by what came of putting its record in place and making its mark."""
        if rows:
            ((fence,),) = rows
            return decide_claim(None, claim, fence / MICROS, fence - 1)
        self._table.expects_known = True
        release = [] if name is None else [(f"RELEASE SAVEPOINT {name}", None)]
        with self.errors:
            *_, known = await self._together(*release, ("add", claim))
        decision = await self._decided(claim, added_or_found(claim.key, latest(known.rows)))
        if name is not None and decision.verdict in GRANTED:
            await self.adapter.savepoint(name)
        return decision

    async def _look(self, claim: Claim) -> Decision | None:
        """The answer to a claim whose record only has to be looked at; None: it has to be changed, or is not there."""
        read = self._sql.one["read"]
        with self.errors:
            (seen,) = await self.adapter.talk(((read, read.encoded((id_of(claim.key),))),))
        if not seen.rows:
            return None
        record, now = found(claim.key, latest(seen.rows))
        decision = decide_claim(record, claim, now, 0)
        return decision if decision.record is record and decision.verdict not in GRANTED else None

    async def _decided(self, claim: Claim, reply: Any) -> Decision:
        """The answer to a claim by the reply to its first step; rarely there is more to say."""
        if type(reply) is Found:
            decision = decide_claim(reply.record, claim, reply.now, 0)
            if decision.record is reply.record:
                return decision
        return await self.claim(claim)

    async def close_with(self, completion: Completion, name: str | None) -> Ending:
        """End the claim and forget the mark, likewise."""
        if name is None or not self.adapter.pipelines:
            return await super().close_with(completion, name)
        with GONE_OR_RAISED:
            ended, _ = await self._together(("settle", completion), (f"RELEASE SAVEPOINT {name}", None))
        return Ending.DONE if ended.changed else await self.complete(completion)

    async def commit_with(self, completion: Completion, name: str | None) -> Ending:
        """The same with COMMIT after it, which comes to nothing where there is no claim to end."""
        if not self.adapter.may_talk() or self.adapter.server_version < MERGES:
            return await super().commit_with(completion, name)
        calls: list[Any] = [(self._sql.one["settle_one"], end_encoded(completion)), (COMMIT, ())]
        if name is not None:
            calls.insert(1, (f"RELEASE SAVEPOINT {name}", ()))
        try:
            await self.adapter.talk(calls)
        except Exception as error:
            if (
                code_of(error) in NOTHING_TO_END and not self.adapter.is_idle()
            ):  # else COMMIT itself was refused
                return Ending.FENCED
            GONE_OR_RAISED.tell(error)
            raise
        return Ending.DONE

    async def _together(self, *calls: tuple[str, Claim | Completion | None]) -> list[Result]:
        """Have named statements about claims and completions, and commands of SQL, done in one round trip."""
        one = self._sql.one
        if self.adapter.may_talk():
            return await self.adapter.talk(
                [(name, ()) if about is None else (one[name], encoded(about)) for name, about in calls]
            )
        return await self.adapter.execute_all(
            [
                (name, ()) if about is None else (one[name].text, _sendable(values_of(about)))
                for name, about in calls
            ]
        )

    async def send(self, steps: Sequence[Step]) -> list[Any]:
        """Have steps done. Who has waited in vain, because another transaction was first, has to look again."""
        steps, replies = list(steps), [AGAIN] * len(steps)
        looks = iter(range(MOST_LOOKS))
        while places := [place for place, reply in enumerate(replies) if reply is AGAIN or reply is LOOK]:
            if next(looks, None) is None:
                raise StoreUnavailable("Other transactions were always first. Run this one again.")
            for place in places:
                if replies[place] is LOOK:
                    steps[place] = Read(steps[place].key)
            for group in grouped(steps, places):
                with self.errors:
                    done = await self._ask(*group.call(self._sql, steps))
                group.settle(done.rows, steps, replies)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    async def _ask(self, statement: Statement, values: Values) -> Result:
        """Have one statement done."""
        if self.adapter.may_talk():
            return (await self.adapter.talk(((statement, statement.encoded(values)),)))[0]
        return await self.adapter.execute(statement.text, _sendable(values))

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
        await adapter.execute(limit, (_text(before),))
        await adapter.release(name)
        return decision


@lru_cache(maxsize=64)
def _statements(table: str, rotating: bool) -> Statements:
    return Statements(table, rotating=rotating)


def _sendable(values: Values) -> list[Any]:
    """Values for any driver. A record's id, which comes first, is a uuid: as text everybody can send it."""
    first, *rest = values
    ids = [str(UUID(bytes=each)) for each in first] if isinstance(first, tuple) else str(UUID(bytes=first))
    return [ids, *(_plain(each) for each in rest)]


def _text(value: Any) -> Any:
    """What a session without an encoding has given as bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, State) else value
