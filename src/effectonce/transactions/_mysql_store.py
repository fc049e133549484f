"""Records in the user's transaction on MySQL and MariaDB, where locks outlast the statement that took them.

A claim is an INSERT that leaves alone what it finds, several in the order of their keys. It never looks first: a look
for a key that is not there would lock the gap in which it is to be put, for everybody, at SERIALIZABLE even without
being asked to. What an INSERT finds it locks until the transaction ends, the row and nothing beside it. So duplicates
in open transactions wait for one another; those that must not wait look at what is there when they would have to.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from .._protocol import decide_claim
from .._records import Claim, Decision
from ..stores import _mysql_sql as words
from ..stores._mysql_values import change_values, new_values, place
from ..stores._steps import BUSY, DONE, Add, Added, End, Found, Read, Step, SteppingStore
from ._stores import TransactionStore
from .base import LOCK_TIMED_OUT, Adapter, Result, Values, code_of

if TYPE_CHECKING:
    from ..stores.mysql import MySQLStore


SAFE_UPDATES: Final = 1175
"""The server refuses an UPDATE that names its keys by a join, and has done nothing."""


class InMySQL(TransactionStore):
    """Over a connection to the server that the table is on, whatever its current database is."""

    def __init__(self, adapter: Adapter, store: MySQLStore) -> None:
        super().__init__(adapter)
        self._language = store.language
        self._sql = _spoken(store.language, store.address.database)
        if not store._is_ready:
            self.own, self.look = store, (self._sql["whose"], ())

    def seen(self, rows: Sequence[Values]) -> None:
        for row in rows:
            engine, comment = ((value or b"").decode() for value in _as_written(row))
            self._language.check(engine, comment)

    async def now(self) -> float:
        """The server's clock."""
        return int((await self.ask(self._sql["now"])).rows[0][0]) / 1e6

    async def claim(self, claim: Claim) -> Decision:
        """Decide one claim."""
        (decision,) = await self.claim_many((claim,))
        return decision

    async def claim_many(self, claims: Sequence[Claim]) -> list[Decision]:
        """Decide many claims. What times out by waiting for a lock is a statement, and nothing else with it."""
        together = [[claim] for claim in claims] if self.at_once else [claims]
        decisions: list[Decision] = []
        for some in together:
            try:
                decisions += await self._limited(some)
            except Exception as error:
                if code_of(error) not in LOCK_TIMED_OUT:
                    raise
                decisions += [await self._held(claim) for claim in some]
        return decisions

    async def _held(self, claim: Claim) -> Decision:
        """The answer to a claim whose record somebody else has locked: perhaps only to read it."""
        try:
            found = (await self._look([claim.key], self._if_committed)).get(claim.key)
        except Exception as error:
            if code_of(error) not in LOCK_TIMED_OUT:
                raise
            return BUSY
        if found is None or found.record is None:
            return BUSY
        decision = decide_claim(found.record, claim, found.now, 0)
        return decision if decision.record is found.record else BUSY

    async def _limited(self, claims: Sequence[Claim]) -> list[Decision]:
        """Decide claims, with as little waiting as the server can be told: MariaDB none, MySQL a second."""
        if not self.at_once or self.adapter.is_mariadb:
            return await SteppingStore.claim_many(self, claims)
        ((before,),) = (await self.ask("SELECT @@SESSION.innodb_lock_wait_timeout")).rows
        await self.ask("SET SESSION innodb_lock_wait_timeout = 1")
        restore = f"SET SESSION innodb_lock_wait_timeout = {int(before)}"
        try:
            decisions = await SteppingStore.claim_many(self, claims)
        except BaseException:
            with suppress(Exception):  # what is told is why there is no answer
                await self.ask(restore)
            raise
        await self.ask(restore)
        return decisions

    # Steps

    async def send(self, steps: Sequence[Step]) -> list[Any]:
        """Have steps done, several claims or endings by one statement, in the order of their keys."""
        in_order = sorted(steps, key=lambda step: step.key)
        replies: dict[str, Any] = {}
        adds = [step for step in in_order if type(step) is Add]
        ends = [step for step in in_order if type(step) is End]
        if adds:
            replies |= await self._add([step.claim for step in adds])
        if len(ends) > 1 and await self._end_all(ends):
            replies |= dict.fromkeys([step.key for step in ends], DONE)
        for step in in_order:
            if step.key not in replies:
                replies[step.key] = await self._do(step)
        return [replies[step.key] for step in steps]

    async def _do(self, step: Step) -> Any:
        if type(step) is not Read:
            name, *values = change_values(step)
            changed = (await self._ask_briefly(self._sql[name] % tuple(values))).changed
            if type(step) is not End:
                return changed == 1
            if changed:
                return DONE
        return (await self._look([step.key])).get(step.key, Found(None, 0.0))

    async def _add(self, claims: list[Claim]) -> dict[str, Added | Found]:
        sql = self._sql
        news = [new_values(claim) for claim in claims]
        insert = sql["add"] % ",".join([sql["new"] % new for new in news])
        if self.adapter.is_mariadb:
            there = await self._ask_briefly(f"{insert} {sql['returning']}")
        else:
            await self._ask_briefly(insert)
            there = await self._ask_briefly(f"{sql['there'] % ','.join([new[0] for new in news])} FOR UPDATE")
        found = self._records(there)
        return {claim.key: _added_or_found(claim, found[claim.key]) for claim in claims}

    async def _end_all(self, ends: list[End]) -> bool:
        """End many by one statement; whether it was all of them. One by one it is found out which were not."""
        rows = [",".join(change_values(end)[1:]) for end in ends]
        asked = (
            f"VALUES ({'),('.join(rows)})"
            if self.adapter.is_mariadb
            else f"SELECT {' UNION ALL SELECT '.join(rows)}"
        )
        try:
            return (await self.ask(self._sql["end_many"] % asked)).changed == len(ends)
        except Exception as error:
            if (
                code_of(error) != SAFE_UPDATES
            ):  # of this session's user, who wants a key named in every UPDATE
                raise
            return False

    async def _look(self, keys: Sequence[str], condition: str = "") -> dict[str, Found]:
        places = ",".join(place(key) for key in keys)
        return self._records(await self._ask_briefly(self._sql["read"] % places + condition))

    @property
    def _if_committed(self) -> str:
        """See nothing where even what others may yet roll back could be seen."""
        level = "@@tx_isolation" if self.adapter.is_mariadb else "@@transaction_isolation"
        return f" AND {level} <> 'READ-UNCOMMITTED'"

    async def _ask_briefly(self, sql: str) -> Result:
        limit = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR " if self._never_waits else ""
        return await self.ask(limit + sql)

    @property
    def _never_waits(self) -> bool:
        return self.at_once and self.adapter.is_mariadb

    @staticmethod
    def _records(result: Result) -> dict[str, Found]:
        """What is there, by key, as of the server's clock."""
        read = (words.read_record(_as_written(row)) for row in result.rows)
        return {record.key: Found(record, now / 1e6) for now, record in read}


@lru_cache(maxsize=64)
def _spoken(language: words.Language, database: str) -> dict[str, str]:
    return language.in_session_of_others(database)


def _added_or_found(claim: Claim, found: Found) -> Added | Found:
    """A record is new if it is this claim's own, and nothing has become of it: an owner is good for one claim."""
    record = found.record
    if record is not None and record.owner == claim.owner and record.attempts == 1 and record.result is None:
        return Added(record.fence, found.now)
    return found


def _as_written(row: Sequence[Any]) -> list[bytes | None]:
    """A row as the server wrote it, before the user's driver made numbers of it."""
    return [each if each is None or isinstance(each, bytes) else str(each).encode() for each in row]
