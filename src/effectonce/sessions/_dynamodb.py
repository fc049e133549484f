"""Sessions in a DynamoDB store's own table: an item for each session and each request, a transaction for each claim.

DynamoDB has no clock. So a session is over when somebody has ended it in the table, and not before: a server whose
clock says that its lease is over, and the store's ``skew`` with it, deletes it, if nobody has renewed the lease
meanwhile, and only then says so. A clock that is fast ends sessions too early; none, however wrong, lets one go on that
was told to be over. That a request's own lease is over is known by watching it, as in the store.

A claim is one transaction, sent without a look before: it renews the session's lease, moves its mark and notes the
number, if all that is as usual, and puts the request where there is none. What fails brings the items along, the rules
decide, and what they say is written if it still is as they saw it.

Numbers below the mark leave some at a time, since the mark itself keeps them from being claimed. What a crash has left
of a session that is over goes when somebody comes by.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, cast

from .._protocol import decide_claim
from .._records import Claim, Completion, Decision, Ending, Record
from ..errors import StoreError, StoreUnavailable, UsageError
from ..stores import _dynamodb_items as items
from ..stores._dynamodb_items import Kept, number
from ..stores._dynamodb_parts import LARGEST_PART
from ..stores._dynamodb_table import MOST_WRITES, Conflict
from ..stores._dynamodb_writes import KEY, Change, Drop, Item, Put, Update, Write
from ..stores.base import Features, Store, StoreStats
from ..stores.dynamodb import DynamoDBStore
from ._dynamodb_shelf import FOREVER, Shelf, as_seen, name_of, numbers_of, parts_names, until_of
from ._rules import Contact, Session, SessionClaim, granted, is_dropped, parts_of
from ._store import DeskStore, Sight, claiming, contacting, ending, or_raised

Seen = dict[str, Item]
"""Items by their keys; an empty one is not there."""

SLACK: Final = MOST_WRITES - 1
"""How many answers may be remembered that are acknowledged: as many as leave with one request."""
NEIGHBOURS: Final = 32
"""How many items a new session looks at."""
TRIES: Final = 40
FIRST_PAUSE, LAST_PAUSE = 0.005, 0.2
"""Seconds until something is tried again at which others were quicker: by lot, and up to twice as many each time."""

CLAIM: Final = "SET u = d + :now, w = :w ADD q :noted"
AS_USUAL: Final = (
    "e = :e AND w <= :w AND d >= :hold AND u > :over "
    "AND NOT contains(q, :number) AND (attribute_not_exists(q) OR size(q) < :most)"
)


class Overtaken(Exception):
    """Somebody has changed a session that seemed to be over."""


class DynamoDBSessions(DeskStore):
    """The sessions in the table of a store's records; ``verbs`` is the store, or its form for event loops."""

    features = Features()

    def __init__(self, shelf: Shelf, verbs: Any) -> None:
        self.shelf, self._verbs = shelf, verbs

    @classmethod
    def beside(cls, store: DynamoDBStore) -> DynamoDBSessions:
        """The sessions in the same table as a store's records."""
        return cls(Shelf(store), store)

    async def contact(self, contact: Contact) -> Session:
        """Open, resume, touch or end a session."""
        seen: Seen = {}
        if contact.kind == "open":
            with suppress(StoreError):  # it is not for this client that others are collected
                await self.purge(NEIGHBOURS)
            seen = {name_of(contact.session): {}}
        work = partial(contacting, contact=contact)
        return cast("Session", or_raised(await self._settled(work, seen, may_end=True)))

    async def claim(self, claim: Claim) -> Decision:
        """Decide one request, with everything that its contact means for its session."""
        asked, seen = cast("SessionClaim", claim), cast("Seen | None", {})
        for pause in _pauses():
            now = self.shelf.store.clock()
            decision = decide_claim(None, claim, now, 0)
            seen = await self._done(self._usual(asked, cast("Record", decision.record), now))
            if seen is None:
                return decision
            if seen:
                break
            # Another transaction has the session; that says nothing against this one.
            await self._verbs.rest(pause)
        work = partial(claiming, claim=asked)
        return granted(await self._settled(work, seen or {}, may_end=True))

    async def complete(self, completion: Completion) -> Ending:
        """End a claim: one write if it is held."""
        seen: Seen = {}
        if completion.owner and completion.began and len(completion.result or b"") <= LARGEST_PART:
            name = name_of(*parts_of(completion.key))
            result: Item = {} if completion.result is None else {"r": {"B": completion.result}}
            write = items.ending_of(name, completion, FOREVER | result)
            # A journal may have parts in items of their own, which have to go as well: then this is not enough.
            no_parts = write._replace(where={**write.where, "n": None})
            refused = await self._done([no_parts])
            if refused is None:
                return Ending.DONE
            seen = refused
        return cast("Ending", await self._settled(partial(ending, completion=completion), seen))

    async def get(self, key: str) -> Record | None:
        """Read a request; one that is acknowledged is not there, also if it has not left yet."""
        name, request = parts_of(key)
        session, record, now = cast("Sight", await self.at_desk(lambda desk: desk.look(name, key)))
        if session is None or record is None or (request < session.low and is_dropped(record, now)):
            return None
        return record

    async def watch(self, record: Record, seconds: float) -> bool:
        """Look now and then whether a request has ended."""
        name = name_of(*parts_of(record.key))
        return cast("bool", await self._verbs.watch(record._replace(key=name), seconds))

    async def purge(self, limit: int = 256) -> int:
        """Look at the next ``limit`` items and forget sessions whose lease is over, and what such have left."""
        return cast("int", await self.errand(partial(self.shelf.sweep, limit))) if limit > 0 else 0

    async def now(self) -> float:
        """This process's wall clock."""
        return self.shelf.store.clock()

    async def stats(self) -> StoreStats:
        """Refused: it would mean to read the whole table."""
        raise UsageError("Sessions in DynamoDB are not counted; its console says how many items a table has.")

    def for_asyncio(self) -> Store:
        """The same, done on threads."""
        return DynamoDBSessions(self.shelf, self.shelf.store.for_asyncio())

    # One step: look, decide, write what was decided if it is as it was seen

    async def at_desk(self, work: Any) -> Any:
        return await self._settled(work, {})

    async def _settled(self, work: Any, seen: Seen, may_end: bool = False) -> Any:
        for pause in _pauses():
            desk, answer = DynamoDBDesk(self, seen, may_end), None
            try:
                answer = await work(desk)
                refused = await self._done(desk.writes())
            except (Overtaken, Conflict):
                refused = {}
            if refused is None:
                if desk.has_litter:
                    with suppress(StoreError):  # what was asked is done; others will come by
                        await self.errand(desk.tidy)
                return answer
            seen = refused
            await self._verbs.rest(pause)
        raise StoreUnavailable(
            f"Too many requests of one session come at once: {TRIES} times others were quicker. Try again."
        )

    async def _done(self, writes: Sequence[Write | Update]) -> Seen | None:
        """Do writes, all or none: None, or what is there instead, as far as that is known."""
        if not writes:
            return None
        try:
            if len(writes) > 1:
                refused = cast("Seen | None", await self.errand(partial(self.shelf.table.transact, writes)))
            else:
                item = await self.errand(partial(self.shelf.table.write, writes[0]))
                is_gone = isinstance(writes[0], Drop) and not item
                refused = None if item is None or is_gone else {writes[0].key: item}
        except Conflict:
            return {}
        if refused is None:
            for write in writes:
                self._note(write)
        return refused

    def _note(self, write: Write | Update) -> None:
        """A claim that was made or renewed here is watched from now on."""
        values: Any = {}
        if isinstance(write, Put | Change):
            values = write.item if isinstance(write, Put) else write.values
        if "l" in values and "o" in values:
            lease, until, version = items.lease_of(values)
            self.shelf.store._watches.begin(write.key, (int(values["f"]["N"]), version), lease, until)
        else:
            self.shelf.store._watches.end(write.key)

    async def errand(self, job: Any) -> Any:
        """Have something done that asks the table."""
        return await self._verbs.errand(job)

    def _usual(self, claim: SessionClaim, record: Record, now: float) -> list[Write | Update]:
        session, request, low, epoch = claim.place
        name, over = name_of(session, request), now - self.shelf.store._skew
        values: Item = {
            ":now": number(now), ":w": number(low), ":noted": {"NS": [str(request)]}, ":e": number(epoch),
            ":hold": number(claim.lease), ":over": number(over), ":number": number(request),
            ":most": number(request - low + 1 + SLACK),
        }  # fmt: skip
        return [
            Update(name_of(session), CLAIM, AS_USUAL, values),
            Put(self.shelf.item_of(name, record, now, {})),
        ]


class DynamoDBDesk:
    """A session and a request as they were seen, and what is to be written if they still are like that."""

    def __init__(self, sessions: DynamoDBSessions, seen: Seen, may_end: bool) -> None:
        self._sessions, self._seen, self._may_end = sessions, dict(seen), may_end
        self._home: Item = {}
        self._kept: Kept | None = None
        self._now = 0.0
        self._before = self._after = cast("Session | None", None)
        self._writes: list[Write | Update] = []
        self._noted: int | None = None
        self._past: list[str] = []
        self._is_gone = False

    @property
    def has_litter(self) -> bool:
        """Whether there is something that nobody needs any more, and enough of it."""
        return bool(self._past) or self._is_gone or len(self._below()) >= SLACK

    def _below(self) -> list[int]:
        return [] if self._after is None else [n for n in numbers_of(self._home) if n < self._after.low]

    async def look(self, session: str, key: str | None = None) -> Sight:
        """Read a session and a request, if they were not seen yet. A session that is over is ended first."""
        sessions, home = self._sessions, name_of(session)
        name = home if key is None else name_of(*parts_of(key))
        if self._seen.get(home) and key is not None and parts_of(key)[1] not in numbers_of(self._seen[home]):
            self._seen.setdefault(name, {})  # a number that is not noted is not there
        unseen = [each for each in dict.fromkeys((home, name)) if each not in self._seen]
        if unseen:
            found: Seen = await sessions.errand(partial(sessions.shelf.table.read_many, unseen))
            self._seen |= {each: found.get(each, {}) for each in unseen}
        self._home, self._now = self._seen[home], sessions.shelf.store.clock()
        if not self._home:
            return Sight(None, None, self._now)
        if self._may_end and sessions.shelf.is_over(self._home):
            if not await sessions.errand(partial(sessions.shelf.end, self._home)):
                raise Overtaken
            return Sight(None, None, self._now)
        # Nobody has ended it, so it lives, whatever this clock says.
        until = max(until_of(self._home), math.nextafter(self._now, math.inf))
        epoch, low, lease = (self._home[attribute]["N"] for attribute in "ewd")
        self._before = Session(session, int(epoch), int(low), float(lease), until)
        return Sight(self._before, await self._record(key, self._seen[name]), self._now)

    async def _record(self, key: str | None, item: Item) -> Record | None:
        if key is None or not item:
            return None
        self._kept = kept = self._sessions.shelf.kept(item, self._now)
        result = kept.result
        if "n" in item:
            result = await self._sessions.errand(partial(self._sessions.shelf.whole, item, kept))
        return kept._replace(key=key, expires_at=math.inf, result=result)

    async def write(self, session: Session, is_new: bool, drops: bool) -> None:
        """Write a session."""
        if not is_new:
            self._after = session
            return
        values = {"e": session.epoch, "w": session.low, "d": session.lease, "u": session.lease_until}
        item: Item = {KEY: {"S": name_of(session.id)}}
        self._writes.append(Put(item | {attribute: number(value) for attribute, value in values.items()}))

    async def put(self, session: str, number: int, record: Record, is_new: bool) -> None:
        """Write a request."""
        name = name_of(session, number)
        shelf, result = self._sessions.shelf, record.result
        stored: Item = {} if result is None else {"r": {"B": result}}
        if result is not None and len(result) > LARGEST_PART:
            stored = await self._sessions.errand(partial(shelf.parts_of, name, result))
        item = shelf.item_of(name, record, self._now, stored)
        if self._may_end and self._after is None:
            self._after = self._before  # a claim holds only if the session is as it was seen
        if self._kept is None:
            self._noted = number
            self._writes.append(Put(item))
            return
        if item.get("d") != self._seen[name].get("d"):
            self._past = parts_names(name, self._seen[name])
        removed = tuple(attribute for attribute in items.ATTRIBUTES if attribute not in item)
        del item[KEY]
        self._writes.append(Change(name, item, removed, items.same_as(self._kept)))

    async def drop(self, session: str, number: int | None = None) -> None:
        """Forget a request, or a session with all of them."""
        if number is not None and self._kept is not None:
            self._past = parts_names(self._kept.key, self._seen[self._kept.key])
            self._writes.append(Drop(self._kept.key, items.same_as(self._kept)))
        elif number is None:
            self._is_gone = True
            self._writes.append(Drop(name_of(session), as_seen(self._home)))

    def writes(self) -> list[Write | Update]:
        """Everything that is to be written."""
        if self._after is None:
            return self._writes
        _, epoch, low, lease, until = self._after
        skew, held = self._sessions.shelf.store._skew, self._home.get("h")
        values: Item = {
            ":e": number(epoch), ":w": number(low), ":u": number(until), ":latest": number(until + skew),
            ":as_e": self._home["e"], ":as_w": self._home["w"],
        }  # fmt: skip
        change, condition = "SET e = :e, w = :w, u = :u", "e = :as_e AND w = :as_w AND u <= :latest"
        condition += " AND attribute_not_exists(h)" if held is None else " AND h = :as_h"
        values |= {} if held is None else {":as_h": held}
        if until > self._now + lease + skew:
            change, values = change + ", h = :h", values | {":h": number(until)}
        if self._noted is not None:
            change, values = change + " ADD q :noted", values | {":noted": {"NS": [str(self._noted)]}}
        return [Update(self._home[KEY]["S"], change, condition, values), *self._writes]

    def tidy(self) -> None:
        """Delete it."""
        shelf, name = self._sessions.shelf, self._home[KEY]["S"]
        for part in self._past:
            shelf.table.write(Drop(part, {}))
        if self._is_gone:
            shelf.forget(name, numbers_of(self._home), is_over=True)
        elif below := self._below():
            shelf.forget_below(name, below)


def _pauses() -> Iterator[float]:
    for tried in range(TRIES):
        yield random.uniform(0.0, min(FIRST_PAUSE * 2**tried, LAST_PAUSE))
