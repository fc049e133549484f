"""The verbs over a PostgreSQL table: steps become statements, and what a statement refuses becomes a reply.

How statements travel is not said here: ``PostgresStore`` sends them from threads, and its other half from event loops.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, TypeVar, cast

from .._records import Claim, Decision, Record, State
from ..errors import StoreError, StoreUnavailable
from ._postgres_sql import Answer, Call, Lost, Refusal, Row, Wires
from ._postgres_steps import AGAIN, CLAIMS, LOOK, Group, grouped, id_of, record_of
from ._postgres_table import ITS_OWN, LOCKED, Table
from ._steps import (
    HELD,
    KEPT,
    Add,
    Added,
    Conversation,
    Read,
    Step,
    SteppingStore,
    by_look,
    claiming,
    unless_failed,
)
from .base import Features, StoreStats

T = TypeVar("T")

PURGE_EVERY, PURGE_SHARE, PURGE_MOST = 32, 4, 256
"""After 32 new claims the hand passes four times as many rows, but not more than 256 at once."""
COUNTED_PAGES = 16_384
"""How much of a table is read to count what is in it: 128 MB."""


class Verbs(SteppingStore):
    """The verbs over one table. The two colours differ in how statements travel."""

    features = Features()

    def __init__(self, table: Table) -> None:
        self._table = table
        self._new_claims = 0

    def wires(self) -> Wires:
        """The connections that this caller uses."""
        raise NotImplementedError

    def purge_aside(self, rows: int) -> bool:
        """Let the hand pass some rows while nobody waits for it; False if the last purge goes on."""
        raise NotImplementedError

    async def run(self, calls: Sequence[Call], together: bool = False) -> Sequence[Answer]:
        """Have statements executed in one round trip, over a table that is there and ours."""
        wires = self.wires()
        try:
            if not self._table.ready:
                await self._table.make_ready(wires)
            return await wires.run(calls, together)
        except Lost as lost:
            raise self._table.unreachable(lost) from lost
        except Refusal as refusal:  # a value that can't even be sent
            if len(calls) > 1 and not together:
                return [(await self.run([call]))[0] for call in calls]
            return [refusal] * len(calls)

    async def ask(self, name: str, *values: Any) -> list[Row]:
        """The rows of one statement."""
        (rows,) = self._rows(await self.run([Call(self._table.sql.one[name], values)]))
        return rows

    def _rows(self, answers: Iterable[Answer]) -> list[list[Row]]:
        for answer in answers:
            if isinstance(answer, Refusal):
                raise self._table.translated(answer)
        return cast("list[list[Row]]", list(answers))

    # Steps

    async def send_once(self, steps: Sequence[Step]) -> Sequence[Any]:
        """Have steps done in one round trip; an exception is the reply to a step that failed by itself."""
        raise NotImplementedError

    async def pause(self, seconds: float) -> None:
        """Let time pass."""
        raise NotImplementedError

    async def send(self, steps: Sequence[Step]) -> list[Any]:
        """Have steps done, and wait for those whose records somebody has, where nobody else has to wait."""
        return unless_failed(await self._settled(steps, await self.send_once(steps)))

    async def send_each(self, steps: Sequence[Step]) -> list[Any]:
        """The same, where an error is the reply to the step that it is about: a lease has to be known to be renewed."""
        return unless_failed(await self._settled(steps, await self.send_once(steps)), but=StoreError)

    async def _settled(self, steps: Sequence[Step], replies: Sequence[Any]) -> Sequence[Any]:
        """The replies when nothing is HELD any more."""
        if HELD not in replies:
            return replies
        return await self.outlast(steps, replies, self.send_once, self.pause, self._table.kept)

    async def claim_held(self, claim: Claim, reply: Any) -> Decision:
        """Decide a claim whose first step had such a reply, or an error."""
        step = (Add(claim),)
        (reply,) = unless_failed(await self._settled(step, (reply,)))
        return await self.go_on(claiming(claim), reply)

    async def execute(self, steps: Sequence[Step]) -> list[Any]:
        """Have steps done in one round trip; an exception is the reply to a step that failed by itself.

        What has to be sent again goes on until nobody is in the way any more; a claim that is HELD does not.
        """
        asked, steps, replies = steps, list(steps), [AGAIN] * len(steps)
        kept, doubted, waited = self._table.kept, list[int](), set[int]()
        give_up = time.monotonic() + self._table.seconds
        if kept:
            doubted = [n for n, step in enumerate(steps) if type(step) in CLAIMS and step.key in kept]
            self._look_instead(steps, doubted)
        parts: list[Sequence[int]] = [range(len(steps))]
        while parts:
            if time.monotonic() > give_up:
                error = StoreUnavailable(f"{self._table.shown} always served others first. Try again.")
                for place in chain(*parts):
                    replies[place] = error
                break
            groups = [group for part in parts for group in grouped(steps, part)]
            answers = await self.run([group.call(self._table.quick, steps) for group in groups])
            apart: list[Sequence[int]] = []
            for group, answer in zip(groups, answers, strict=True):
                if not isinstance(answer, Refusal):
                    group.settle(answer, steps, replies)
                elif len(group.places) > 1 and answer.code.startswith(ITS_OWN):
                    apart += group.apart()
                else:
                    self._refused(answer, group, steps, replies, waited)
            parts = self._left(parts, apart, steps, replies)
        for place in doubted:
            replies[place] = by_look(asked[place], replies[place], KEPT)
        self.count(list(map(type, replies)).count(Added))
        return replies

    def _left(
        self,
        parts: Iterable[Sequence[int]],
        apart: list[Sequence[int]],
        steps: list[Step],
        replies: Sequence[Any],
    ) -> list[Sequence[int]]:
        """What has to be sent again: together, except for what goes apart."""
        again = [place for place in chain(*parts) if replies[place] is AGAIN or replies[place] is LOOK]
        self._look_instead(steps, [place for place in again if replies[place] is LOOK])
        going = set(chain(*apart))
        together = [place for place in again if place not in going]
        return [together, *apart] if together else apart

    def _look_instead(self, steps: list[Step], places: Iterable[int]) -> None:
        for place in places:
            steps[place] = Read(steps[place].key)

    def _refused(
        self, refusal: Refusal, group: Group, steps: Sequence[Step], replies: list[Any], waited: set[int]
    ) -> None:
        """A statement failed, for all of its rows. One that has waited for a lock may do so once more."""
        if refusal.code in self._table.try_again:
            return
        for place in group.all_places:
            if refusal.code == LOCKED and type(steps[place]) in CLAIMS:
                replies[place] = HELD
            elif refusal.code != LOCKED or place in waited:
                replies[place] = self._table.translated(refusal)
            else:
                waited.add(place)

    async def go_on(self, conversation: Conversation[T], reply: Any) -> T:
        """Go on with a conversation whose first step has been replied to."""
        next(conversation)
        try:
            while True:
                (reply,) = await self.send((conversation.send(reply),))
        except StopIteration as done:
            return cast("T", done.value)

    def count(self, new_claims: int) -> None:
        """Let a purge ride along with every few new claims."""
        self._new_claims += new_claims
        if self._new_claims >= PURGE_EVERY and self.purge_aside(
            min(self._new_claims * PURGE_SHARE, PURGE_MOST)
        ):
            self._new_claims = 0

    # Everything else

    async def purge(self, limit: int = 256) -> int:
        """Let the hand pass over some pages and forget at most ``limit`` expired records there."""
        gone = 0
        for call in self._table.chores(max(limit, 0)):
            (answer,) = await self.run([call])
            gone += self._done(call, answer)
        return gone

    async def tend(self, rows: int) -> None:
        """What is to be done beside traffic."""
        call = self._table.chore(rows)
        if call is not None:
            (answer,) = await self.run([call])
            self._done(call, answer)

    def _done(self, call: Call, answer: Answer) -> int:
        """How much a chore has forgotten."""
        if isinstance(answer, Refusal) and self._table.can_wait(call, answer):
            return 0
        ((row,),) = self._rows([answer])
        return self._table.passed(call, row)

    async def scan(self, state: State | None = None, after: str = "", limit: int = 256) -> list[Record]:
        """Records in key order. Keys are not indexed as such: each page is a way through the whole table."""
        rows = await self._read_all(Call(self._table.sql.one["scan"], (after, state, limit)))
        return [record_of(row[0], row) for row in rows]

    async def now(self) -> float:
        """The server's clock."""
        ((now,),) = await self.ask("now")
        return cast("float", now)

    async def stats(self) -> StoreStats:
        """Count what is there: exactly up to some half a million keys, beyond that as a sample of as many suggests."""
        ((size, pages),) = await self.ask("size")
        share = min(COUNTED_PAGES / max(pages, 1), 1.0)
        census = await self._read_all(Call(self._table.sql.one["census"], (100.0 * share,)))
        leases = [lease for state, _, _, lease in census if state == State.PENDING]
        return StoreStats(
            keys=round(sum(count for _, count, _, _ in census) / share),
            bytes=size,
            by_state={State(state).name: round(count / share) for state, count, _, _ in census},
            oldest_pending_lease=min(leases, default=None),
            expired=round(sum(expired for _, _, expired, _ in census) / share),
        )

    async def _read_all(self, call: Call) -> list[Row]:
        may = Call(self._table.sql.one["may_read_all"])
        _, rows = self._rows(await self.run([may, call], together=True))
        return rows

    async def migrate(self) -> bool:
        """Make the table, or bring it up to date; whether there was something to do."""
        try:
            return await self._table.make_ready(self.wires(), create=True)
        except Lost as lost:
            raise self._table.unreachable(lost) from lost

    async def mark(self, record: Record) -> bool:
        """Have whoever ends this pending record tell of it; False if it has ended."""
        return bool(await self.ask("watch", id_of(record.key), record.fence))
