"""Records in a DynamoDB table. Every verb is one conditional write; a duplicate comes back with the write that failed.

DynamoDB has no clock to ask, and callers' clocks differ. So no claim is taken over by a clock: its lease is over for a
process when that process has watched the same version of the record for the whole lease, on its own monotonic clock.
Each renewal makes a new version, and the watch begins again. Until then the record is shown with what is left to
watch, and the protocol decides as it does everywhere.

Wall clocks decide only when a record may be forgotten, and where a new key's fence begins: at their microseconds. Both
are safe while no two clocks differ by more than ``skew``, since records are kept that much longer than asked.

DynamoDB deletes expired items by their attribute ``t``, some time within days. Nothing relies on when, and what may not
be forgotten (a doubt, a claim at most once) has no ``t``.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from .._fork import tell_of_forks
from .._protocol import decide_claim, is_expired
from .._records import NOBODY, Record, State
from ..errors import StoreError, StoreUnavailable, UsageError
from . import _dynamodb_items as items
from ._crew import Crew, awaited
from ._dynamodb_items import Glance, Kept, Watches, item_key, number
from ._dynamodb_parts import LARGEST_PART, stored, whole
from ._dynamodb_table import MOST_WRITES, Outcome, Table
from ._dynamodb_writes import EXPIRY, KEY, Change, Item, Put
from ._steps import DONE, Add, Added, End, Found, Hold, Read, Save, Step, SteppingStore, Swap
from ._urls import shown
from .base import Features, Store, StoreStats

T = TypeVar("T")
Asked = Step | Glance

LARGEST_SHARED = 16_384
"""Bytes of a result that may share a request with others."""
THREADS = 4
"""Requests that a crowd has on its way at once; each carries up to 25 steps."""
ERRANDS = 16
"""What else is done for callers on event loops at once: requests of sessions, and operators' questions."""
LONERS = 2
"""Threads that go alone at once, each with its own step; who comes when so many are on their way joins the crowd."""
STATS_PAGES = 8
FIRST_PAUSE, LAST_PAUSE, PATIENCE = 0.005, 0.5, 8
"""Seconds between two looks at a claim that is waited for: an eighth of the wait so far, within these."""


class _Verbs(SteppingStore):
    """What the two colours have in common beside the six verbs."""

    features = Features()
    store: DynamoDBStore

    async def send(self, steps: Sequence[Asked]) -> list[Any]:
        raise NotImplementedError

    async def errand(self, job: Callable[[], T]) -> T:
        """Have something done that is no step."""
        raise NotImplementedError

    async def rest(self, seconds: float) -> None:
        """Do nothing for a while."""
        raise NotImplementedError

    async def watch(self, record: Record, seconds: float) -> bool:
        """Look now and then whether a claim has ended. A look costs a tenth of asking for the key, which is a write."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < seconds:
            await self.rest(min(max(waited / PATIENCE, FIRST_PAUSE), LAST_PAUSE, seconds - waited))
            (ended,) = await self.send((Glance(record.key, record.fence),))
            if ended:
                break
        return True

    async def purge(self, limit: int = 256) -> int:
        """Look at ``limit`` items and delete the expired ones. DynamoDB does so by itself where ``t`` is its TTL."""
        return await self.errand(partial(self.store.sweep, limit))

    async def scan(self, state: State | None = None, after: str = "", limit: int = 256) -> list[Record]:
        """Records in key order. The table has none, so each call reads it whole: for operators and sweepers only."""
        return await self.errand(partial(self.store.listing, state, after, limit))

    async def stats(self) -> StoreStats:
        """Count what is there: exactly up to some 8 MB. Of a larger table it is a sample, scaled up by DynamoDB's own
        count of its items, which is up to six hours old. Leases are told by the clocks of those who hold them.
        """
        return await self.errand(self.store.census)

    async def now(self) -> float:
        """This process's wall clock."""
        return self.store.clock()


class DynamoDBStore(_Verbs):
    """A store in the DynamoDB table ``table``. Credentials are found by boto3's own rules.

    region     the table's region; by default boto3's
    endpoint   the URL of another server than Amazon's, such as DynamoDB Local
    timeout    seconds until an unanswered request is StoreUnavailable; making the table may take longer, once
    create     make the table when it is not there: paid per request, with ``t`` as its time to live
    skew       by how many seconds the clocks of those who share the table may differ; records are kept for that much
               longer, and those with a shorter keep for twice that
    clock      this process's wall clock, in seconds
    monotonic  its monotonic one, by which leases are watched

    What breaks its promises: clocks that differ by more than ``skew``; a global table written to in several regions; a
    backup that is restored over what has happened since.
    """

    def __init__(
        self,
        table: str,
        *,
        region: str | None = None,
        endpoint: str | None = None,
        timeout: float = 5.0,
        create: bool = True,
        skew: float = 7200.0,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        _check(table, endpoint, timeout, skew)
        self.store, self.clock, self._monotonic, self._skew = self, clock, monotonic, skew
        self._table = Table(table, region, endpoint, timeout, create)
        self._last_stamp = 0
        self._hand: Item | None = None
        self._crew: Crew | None = None
        self._start()
        tell_of_forks(self)

    @classmethod
    def from_url(cls, url: str, options: dict[str, str]) -> DynamoDBStore:
        """``dynamodb://table?region=eu-west-1``, ``&endpoint=http://localhost:8000&timeout=5&create=no&skew=7200``."""
        parts = urlsplit(url)
        if not parts.netloc or "@" in parts.netloc or parts.fragment or parts.path not in ("", "/"):
            raise UsageError(
                f"{shown(url)!r} does not name a table and nothing else. Write dynamodb://TABLE?region=REGION; "
                "credentials are found by boto3 and have no place in a URL."
            )
        yes_or_no = {"yes": True, "no": False}.__getitem__
        known: dict[str, Callable[[str], Any]]
        known = {"region": str, "endpoint": str, "timeout": float, "skew": float, "create": yes_or_no}
        try:
            chosen = {name: known[name](value) for name, value in options.items()}
        except (KeyError, ValueError):
            raise UsageError(
                f"{shown(url)!r} has an option that is unknown or makes no sense. Known are region=REGION, "
                "endpoint=URL, timeout=SECONDS, create=yes|no and skew=SECONDS."
            ) from None
        return cls(parts.netloc, **chosen)

    def migrate(self) -> None:
        """Make the table if it is not there, and have DynamoDB delete what has expired."""
        self._table.make()

    async def send(self, steps: Sequence[Asked]) -> list[Any]:
        """Do steps on the caller's own thread; on others' with what they have to do, if there is much to do."""
        lane = self._free_lane() if len(steps) == 1 else None
        if lane is not None:
            try:
                return [self._do(steps[0])]
            finally:
                self._lanes.append(lane)
        if len(steps) == 1 or len(steps) > MOST_WRITES:
            return _waited_for(self.crew().submit(steps))
        replies = self.perform(steps)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    async def send_each(self, steps: Sequence[Asked]) -> list[Any]:
        """The same, where each request may fail by itself."""
        if 1 < len(steps) <= MOST_WRITES:
            return self.perform(steps)
        return _waited_for(self.crew().submit(steps, each=True))

    async def errand(self, job: Callable[[], T]) -> T:
        """Do something on the caller's own thread."""
        return job()

    async def rest(self, seconds: float) -> None:
        """Let the caller's own thread sleep."""
        time.sleep(seconds)  # noqa: ASYNC251 — there is no loop here to block

    def for_asyncio(self) -> Store:
        """The same verbs, done on threads."""
        return _OnThreads(self)

    def crew(self) -> Crew:
        """The threads; they are made when they are needed."""
        with self._lock:
            if self._table.closed:
                raise StoreUnavailable("The store is closed.")
            if self._crew is None:
                self._crew = Crew(self.perform, THREADS, lambda: self._table.most_at_once, ERRANDS)
            return self._crew

    def close(self) -> None:
        """Close the connections. What is on its way is finished first."""
        if self._crew is not None:
            self._crew.close()
        self._table.close()

    def before_fork(self) -> None:
        """Nothing to bring to rest: the child gets connections and threads of its own."""

    def after_fork(self, *, in_child: bool) -> None:
        """The parent's connections, threads and locks are not the child's."""
        if in_child:
            self._table.start()
            self._crew = None
            self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._lanes = list(range(LONERS))
        self._watches = Watches(self._monotonic)

    def _free_lane(self) -> int | None:
        try:
            return self._lanes.pop()
        except IndexError:
            return None

    # Steps

    def perform(self, steps: Sequence[Asked]) -> list[Any]:
        """Do up to 25 steps in as few requests as can be: a reply or an error for each."""
        first = {step.key: step for step in reversed(steps) if _is_small(step)}  # of each key
        replies = self._together([*first.values()]) if len(first) > 1 else {}
        met: dict[tuple[type, Any], Any] = {}
        for step in steps:
            twins: tuple[type, Any] = (Glance, step) if isinstance(step, Glance) else (type(step), step.key)
            if id(step) not in replies:
                replies[id(step)] = met[twins] if twins in met else _caught(self._do, step)
            if isinstance(step, Glance) or (type(step) is Add and type(replies[id(step)]) is Found):
                met[twins] = replies[id(step)]  # what one has met, its twins would meet as well
        return [replies[id(step)] for step in steps]

    def _together(self, steps: list[Asked]) -> dict[int, Any]:
        now = self.clock()
        reads = [step for step in steps if type(step) is Read]
        glances = [step for step in steps if isinstance(step, Glance)]
        writes = [(step, self._write_of(step, now)) for step in steps if not isinstance(step, Read | Glance)]
        try:
            found = self._table.read_many([item_key(step.key) for step in reads])
            seen = self._table.read_many([item_key(step.key) for step in glances], as_now=False)
            outcomes = self._table.write_many([write for _, write in writes]) if writes else []
        except StoreError as error:
            return {id(step): error for step in steps}
        replies = {
            id(step): _caught(self._found, step.key, found.get(item_key(step.key), {})) for step in reads
        }
        replies |= {
            id(step): items.has_ended(seen.get(item_key(step.key), {}), step.fence) for step in glances
        }
        for (step, write), outcome in zip(writes, outcomes, strict=True):
            replies[id(step)] = _caught(self._reply, step, write, outcome, now)
        return replies

    def _do(self, step: Asked) -> Any:
        if isinstance(step, Read):
            return self._found(step.key, self._table.read(item_key(step.key)))
        if isinstance(step, Glance):
            return items.has_ended(self._table.read(item_key(step.key), as_now=False), step.fence)
        if isinstance(step, Save) and len(step.renewal.progress or b"") > LARGEST_PART:
            # Such a journal goes into items of its own: the protocol reads the record and swaps all of it.
            return self._do(Read(step.key))
        now = self.clock()
        write = self._write_of(step, now)
        return self._reply(step, write, self._table.write(write), now)

    def _write_of(self, step: Step, now: float) -> Put | Change:
        """The conditional write that a step is."""
        match step:
            case Add(claim):
                fence = self._stamp(now)
                added = cast("Record", decide_claim(None, claim, now, fence - 1).record)
                times = items.times_of(added, now, self._skew)
                return Put(items.item_of(added, claim.lease, fence, times, {}))
            case End(completion):
                key, _, fence, state, result, keep, _ = completion
                ended = Record(key, state, NOBODY, fence, b"", 0.0, 1, result, now + keep, False)
                times = items.times_of(ended, now, self._skew)
                return items.ending_of(item_key(key), completion, times | stored(self._table, ended, times))
            case Hold(renewal) | Save(renewal):
                key, owner, fence, lease, keep, journal = renewal
                until = now + lease
                held = Record(key, State.PENDING, owner, fence, b"", until, 1, None, until + keep, False)
                times = items.times_of(held, now, self._skew)
                values = items.held_until(until, lease, self._stamp(now)) | times
                # Claimed at most once it has no t to renew: the condition fails, and the protocol swaps all of it.
                where = {**items.held_by(owner, fence), "m": None}
                if journal is None:
                    return Change(item_key(key), values, (), where)
                kept: Item = {"r": {"B": journal}}
                return Change(item_key(key), values | kept, (), {**where, "n": None}, longer="r")
            case Swap(before, after):
                seen = cast("Kept", before)
                times = items.times_of(after, seen.seen_at, self._skew)
                lease, version = after.lease_until - seen.seen_at, self._stamp(now)
                values = items.item_of(after, lease, version, times, stored(self._table, after, times))
                del values[KEY]
                removed = tuple(name for name in items.ATTRIBUTES if name not in values)
                return Change(item_key(before.key), values, removed, items.same_as(seen))
        raise AssertionError(f"{step!r} is no write")

    def _reply(self, step: Step, write: Put | Change, outcome: Outcome, now: float) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is not None:
            return False if type(step) is Swap else self._found(step.key, outcome)
        values: Any = write.item if isinstance(write, Put) else {**write.where, **write.values}
        fence = int(values["f"]["N"])
        if "l" in values:
            lease, until, version = items.lease_of(values)
            self._watches.begin(step.key, (fence, version), lease, until)
        else:
            self._watches.end(step.key)
        if type(step) is Add:
            return Added(fence, now)
        return True if type(step) is Swap else DONE

    def _found(self, key: str, item: Item) -> Found:
        now = self.clock()
        record = items.record_of(item, now, self._watches.lease_seems_to_end) if item else None
        if record is not None and record.owner:
            if self._watches.is_past(key, record.fence):  # another thread's claim has overtaken this reply
                item = self._table.read(item_key(key))
            record = items.record_of(item, now, self._watches.lease_ends) if item else None
        if record is not None and record.key != key:
            raise items.not_ours(item)
        return Found(None if record is None else whole(self._table, item, record), now)

    def _stamp(self, now: float) -> int:
        """Microseconds since 1970, but never the same twice, and never less than before."""
        with self._lock:
            self._last_stamp = max(self._last_stamp + 1, int(now * 1_000_000))
            return self._last_stamp

    # Operators' questions

    def sweep(self, limit: int) -> int:
        """Look at the next ``limit`` items and delete the expired ones."""
        if limit < 1:
            return 0
        now = self.clock()
        found, self._hand = next(self._table.pages(self._hand, Limit=limit))
        return sum(self._delete(item, now) for item in found)

    def listing(self, state: State | None, after: str, limit: int) -> list[Record]:
        """The first ``limit`` records of a state whose key follows ``after``."""
        choices: dict[str, Any] = {"ConsistentRead": True}
        if state is not None:
            choices |= {"FilterExpression": "s = :s", "ExpressionAttributeValues": {":s": number(state)}}
        every = (item for page, _ in self._table.pages(**choices) for item in page if items.is_record(item))
        following = (item for item in every if items.key_of(item) > after)
        now = self.clock()
        return [self._record_of(item, now) for item in heapq.nsmallest(limit, following, key=items.key_of)]

    def census(self) -> StoreStats:
        """A count of the whole table, or of a sample: items lie in the order of their keys' hashes."""
        now = self.clock()
        states: Counter[str] = Counter()
        seen, size, expired, leases, whole = 0, 0, 0, list[float](), False
        for _, (page, following) in zip(range(STATS_PAGES), self._table.pages(), strict=False):
            whole = following is None
            seen, size = seen + len(page), size + sum(map(items.size_of, page))
            for item in page:
                if items.is_record(item):
                    record = items.record_of(item, now, self._watches.lease_seems_to_end)
                    states[record.state.name] += 1
                    expired += is_expired(record, now)
                    leases += [record.lease_until - now] if record.owner else []
        scale = 1.0 if whole else max(1.0, self._table.items_counted() / max(seen, 1))
        by_state = {name: round(count * scale) for name, count in states.items()}
        keys, first = round(states.total() * scale), min(leases, default=None)
        return StoreStats(keys, round(size * scale), by_state, first, round(expired * scale))

    def _delete(self, item: Item, now: float) -> bool:
        """Delete an item if it has expired and nobody changes it meanwhile: whether a record is gone."""
        key = item[KEY]["S"]
        if items.is_part(item):
            if EXPIRY in item and items.seconds(item[EXPIRY]) <= now:
                self._table.delete(key, {EXPIRY: item[EXPIRY]})
            return False
        if not items.is_record(item):
            return False
        watches = self._watches
        for lease in (watches.lease_seems_to_end, watches.lease_ends):  # watch only what seems to be over
            record = items.record_of(item, now, lease)
            if not is_expired(record, now):
                return False
        return self._table.delete(key, items.same_as(record))

    def _record_of(self, item: Item, now: float) -> Record:
        """A record as operators see it, with its result."""
        return whole(self._table, item, items.record_of(item, now, self._watches.lease_seems_to_end))


class _OnThreads(_Verbs):
    """The store for callers on event loops: the steps of one turn, and what queues up meanwhile, share requests."""

    def __init__(self, store: DynamoDBStore) -> None:
        self.store = store

    async def send(self, steps: Sequence[Asked]) -> list[Any]:
        return await awaited(self.store.crew().submit(steps)) if steps else []

    async def send_each(self, steps: Sequence[Asked]) -> list[Any]:
        return await awaited(self.store.crew().submit(steps, each=True)) if steps else []

    async def errand(self, job: Callable[[], T]) -> T:
        return await awaited(self.store.crew().run(job))

    async def rest(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def close(self) -> None:
        self.store.close()


def _check(table: str, endpoint: str | None, timeout: float, skew: float) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_.-]{3,255}", table):
        raise UsageError(
            f"{table!r} can't be a table's name: DynamoDB wants 3 to 255 letters, digits, _, - and dots."
        )
    if endpoint is not None and not _is_endpoint(endpoint):
        raise UsageError(
            f"endpoint={shown(endpoint)!r} must be a URL such as http://localhost:8000, with no credentials in it."
        )
    if not 0 < timeout < math.inf:
        raise UsageError(f"timeout={timeout!r} must be a number of seconds above 0.")
    if not 0 <= skew < math.inf:
        raise UsageError(f"skew={skew!r} must be a number of seconds, 0 or more.")


def _is_endpoint(url: str) -> bool:
    """Whether a URL names a server, and nothing else."""
    try:
        return re.fullmatch(r"https?://[^@#\s]+", url) is not None and urlsplit(url).port != 0
    except ValueError:  # a port that is none
        return False


def _is_small(step: Asked) -> bool:
    match step:
        case End(completion):
            return len(completion.result or b"") <= LARGEST_SHARED
        case Swap(_, after):
            return len(after.result or b"") <= LARGEST_SHARED
        case Save():
            return False
    return True


def _caught(do: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return do(*arguments)
    except StoreError as error:
        return error


def _waited_for(work: Future[T]) -> T:
    try:
        return work.result()
    except BaseException:
        work.cancel()
        raise
