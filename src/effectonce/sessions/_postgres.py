"""Sessions in two tables beside a PostgreSQL store's: one statement for each verb, over the store's connections.

A statement that claims touches the session's row first, and so has it: requests of one client go one after the other
for as long as that takes, and the mark that each sees is the last one. What callers on an event loop ask for at the
same moment is one transaction, in the order of sessions that everybody keeps to.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, cast

from .._records import State
from ..errors import StoreMismatch, StoreUnavailable
from ..stores._loops import PerLoop
from ..stores._named import statements
from ..stores._postgres_crowds import LANES
from ..stores._postgres_sql import Answer, Call, Refusal, Row, Statement
from ..stores._postgres_table import ALREADY_THERE, LOCKED, TRY_AGAIN
from ..stores._steps import DONE, KEPT, Add, Added, End, Found, Read, Step, SteppingStore, Swap
from ..stores._turns import Turns
from ..stores.base import Features, Store, StoreStats
from ..stores.postgres import PostgresStore
from ._rules import Contact, Session, SessionClaim, expired, parts_of, refusal_of, stale
from ._sql import NEIGHBOURS, STATES, Tables, columns_of, named, record_of
from ._store import SessionStore

ENDED: Final = (State.COMPLETED, State.FAILED)
AGAIN: Any = object()
"""In place of a reply: the step has to be sent again, because another statement was first."""


class _Said:
    """The statements of one pair of tables, and whether these are there; both colours share it."""

    def __init__(self, store: PostgresStore) -> None:
        table = store._table.name
        self.names = (f'{table[:-1]}_sessions"', f'{table[:-1]}_requests"')
        self.of = _statements(*self.names)
        self.tables = Tables("postgresql", named("postgresql", *self.names))
        self.ready = False


@cache  # so that it is the same statement to a connection that two sorts of sessions share
def _statements(sessions: str, requests: str) -> dict[str, Statement]:
    alone = f'"{sessions.split(chr(34))[-2]}"'  # without its schema
    places = {"{sessions}": sessions, "{requests}": requests, "{sessions_alone}": alone}
    made: dict[str, Statement] = {}
    for name, text in statements("postgres_steps.sql", __file__).items():
        for place, own in places.items():
            text = text.replace(place, own)
        made[name] = Statement(f"effectonce_session_{name}", text)
    return made


class PostgresSessions(SteppingStore, SessionStore):
    """The sessions beside the records of a PostgreSQL store."""

    features = Features()

    def __init__(self, store: PostgresStore, verbs: Any, said: _Said) -> None:
        self._store, self._verbs, self._said = store, verbs, said
        self.tables = said.tables

    @classmethod
    def beside(cls, store: PostgresStore) -> PostgresSessions:
        """The sessions in the schema of a store's table. Their tables are made when they are first used."""
        return cls(store, store, _Said(store))

    # Statements

    async def _run(self, *calls: Call, together: bool = False) -> list[Answer]:
        if not self._said.ready:
            await self._make_ready()
        return list(await self._verbs.run(calls, together))

    async def _rows(self, name: str, *values: Any) -> list[Row]:
        while True:
            (answer,) = await self._run(Call(self._said.of[name], values))
            if not isinstance(answer, Refusal):
                return answer
            if answer.code not in TRY_AGAIN:
                raise self._store._table.translated(answer)

    async def _make_ready(self) -> None:
        """Make the tables if they are not there, and if the store may."""
        table = self._store._table
        asked = Call(self._said.of["whose"], (self._said.names[1],))
        for _ in range(2):
            (answer,) = await self._verbs.run([asked])
            if isinstance(answer, Refusal):
                raise table.translated(answer)
            if answer and answer[0][0] is not None:
                self._said.ready = True
                return
            if not table._create:
                break
            made = [Call(Statement("", text)) for text in self.tables.sql.schema]
            refusals = [a for a in await self._verbs.run(made, together=True) if isinstance(a, Refusal)]
            if refusals and refusals[0].code not in ALREADY_THERE:
                raise table.translated(refusals[0])
        raise StoreMismatch(
            f"There are no tables {' and '.join(self._said.names)} in {table.shown}. Have a role that may create them "
            "run the statements of `Sessions.ddl()`."
        )

    async def migrate(self) -> None:
        """Make the tables if they are not there."""
        await self._rows("census")

    # The verbs

    async def contact(self, contact: Contact) -> Session:
        """Open, resume, touch or end a session."""
        kind, name, epoch, low, lease = contact
        if kind == "open":
            ((_, *made, _),) = await self._rows("open", name, lease, NEIGHBOURS)
            return Session(name, *made)
        if kind == "end":
            ((now, *columns),) = await self._rows("end", name, epoch)
        else:
            resumes = kind == "resume"
            values = (0 if resumes else epoch, 0 if resumes else low, int(resumes))
            ((now, *columns),) = await self._rows("touch", name, *values)
        if columns[0] is not None:
            return Session(name, *columns[:4])
        raise refusal_of(_session(name, columns[4:]), epoch, now) or expired()

    async def send(self, steps: Sequence[Step]) -> list[Any]:
        """Have steps done in one round trip."""
        return _unless_refused(await self.execute(steps))

    async def execute(self, steps: Sequence[Step]) -> list[Any]:
        """Have steps done, again what others were first with; a refusal is the reply to the step that it is about."""
        steps, replies = list(steps), [AGAIN] * len(steps)
        give_up = time.monotonic() + self._store._table.seconds
        while places := [place for place, reply in enumerate(replies) if reply is AGAIN]:
            if time.monotonic() > give_up:
                raise StoreUnavailable(f"{self._store._table.shown} always served others first. Try again.")
            places.sort(key=lambda place: parts_of(steps[place].key))  # so that nobody waits for one another
            answers = await self._answers([self._call(steps[place]) for place in places])
            for place, answer in zip(places, answers, strict=True):
                replies[place] = self._replied(steps[place], answer)
                if replies[place] is AGAIN and type(steps[place]) is End:
                    steps[place] = Read(steps[place].key)
        return replies

    async def _answers(self, calls: list[Call]) -> list[Answer]:
        """What the server says, to each statement by itself."""
        return await self._run(*calls)

    def _call(self, step: Step) -> Call:
        """A step as a statement. What is not known here is read, and then swapped by the conversation."""
        name, number = parts_of(step.key)
        said = self._said.of
        if type(step) is Add:
            claim = cast("SessionClaim", step.claim)
            place = (claim.place.low, claim.place.epoch)
            values = (claim.lease, int(claim.once), claim.owner, claim.fingerprint or None)
            return Call(said["claim"], (name, number, *place, *values))
        if type(step) is End and step.completion.state in ENDED:
            done = step.completion
            return Call(said["finish"], (name, number, done.owner, done.fence, int(done.state), done.result))
        if type(step) is Swap:
            before = step.before
            same = (int(before.state), before.fence, before.owner or None, before.lease_until or None)
            return Call(said["swap"], (name, number, *same, *columns_of(step.after)))
        return Call(said["read"], (name, number))

    def _replied(self, step: Step, answer: Answer) -> Any:
        if isinstance(answer, Refusal):
            if answer.code in TRY_AGAIN:
                return AGAIN
            if answer.code == LOCKED and type(step) in (Add, Swap):
                return KEPT
            return self._store._table.translated(answer)
        if type(step) is Add:
            return _claimed(cast("SessionClaim", step.claim), answer[0])
        if type(step) is Swap:
            return bool(answer)
        if type(step) is End and step.completion.state in ENDED:
            return DONE if answer else AGAIN
        now, *columns = answer[0]
        return Found(None if columns[0] is None else record_of(step.key, tuple(columns)), now)

    # Everything else

    async def purge(self, limit: int = 256) -> int:
        """Look at ``limit`` sessions and forget those whose lease is over."""
        ((*_, gone),) = await self._rows("open", secrets.token_hex(16), 0.0, limit)
        return cast("int", gone)

    async def now(self) -> float:
        """The server's clock."""
        return cast("float", await self._verbs.now())

    async def stats(self) -> StoreStats:
        """Count the requests that are remembered."""
        by_state = {STATES[state].name: count for state, count in await self._rows("census")}
        return StoreStats(keys=sum(by_state.values()), bytes=0, by_state=by_state)

    def for_asyncio(self) -> Store:
        """The same over the connections of event loops."""
        return _OnLoops(self._store, self._store.for_asyncio(), self._said)


class _OnLoops(PostgresSessions):
    """For callers on event loops: what comes in one turn of a loop is one transaction, and so one commit."""

    def __init__(self, store: PostgresStore, verbs: Any, said: _Said) -> None:
        super().__init__(store, verbs, said)
        self._loops = PerLoop(lambda: _Loop(self))

    async def send(self, steps: Sequence[Step]) -> list[Any]:
        """Have steps done, together with those of everyone who waits on this loop."""
        return list(await self._loops.here().turns.submit(steps))

    async def _answers(self, calls: list[Call]) -> list[Answer]:
        """What the server says to all together; if it refuses one, to each by itself."""
        if len(calls) > 1:
            answers = await self._run(*calls, together=True)
            if not any(isinstance(answer, Refusal) for answer in answers):
                return answers
        return await self._run(*calls)


class _Loop:
    """The turns in which the callers of one event loop go."""

    def __init__(self, sessions: _OnLoops) -> None:
        self.turns: Turns[Step, Any] = Turns(sessions.execute, LANES)

    def close(self) -> None:
        """Nothing to give back: the connections are the store's."""


def _unless_refused(replies: list[Any]) -> list[Any]:
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def _claimed(claim: SessionClaim, row: Row) -> Any:
    """What the statement says of a claim."""
    now, low, fence, *rest = row
    session, known = rest[:4], rest[4:]
    if low is None:
        refusal = refusal_of(_session(claim.place.session, session), claim.place.epoch, now)
        if refusal is None:  # it was good when it was read, and not when it was to be touched
            return AGAIN
        return refusal
    if claim.place.number < low:
        return stale(claim.key, claim.place.number, low)
    if fence is not None:
        return Added(fence, now)
    return AGAIN if known[0] is None else Found(record_of(claim.key, tuple(known)), now)


def _session(name: str, columns: Sequence[Any]) -> Session | None:
    return None if columns[0] is None else Session(name, *columns)
