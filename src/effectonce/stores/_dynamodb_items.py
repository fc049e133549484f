"""Records as items of a DynamoDB table, and how long a lease lasts where no server has a clock. No I/O here.

What is usual or empty in a record is missing in its item: every attribute is paid for with each write and read.

    k  key, or a name made from it when it is too long; then K is the key
    s  state        f  fence      a  attempts, if not 1     p  fingerprint
    o  owner, as long as somebody holds the record; and as long
    l  its lease in seconds, the lease's end by its owner's clock, and a version, which each claim and renewal changes
    t  when it may be forgotten, and DynamoDB delete it; or, of what may not be forgotten, e  what would be t
    m  1 if claimed at most once
    r  result, or journal; of a large one  n  the number of its parts, and  d  their name
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from hashlib import sha256
from typing import NamedTuple

from .._protocol import is_expired
from .._records import NOBODY, Completion, Record, State, make
from ..errors import StoreMismatch
from ._dynamodb_writes import EXPIRY, KEY, Change, Item

STATES = {str(int(state)): state for state in State}
ATTRIBUTES = ("K", "a", "d", "e", "f", "l", "m", "n", "o", "p", "r", "s", EXPIRY)
"""All but the key."""
LONGEST_KEY = 1024
"""Bytes of a key that is its item's key itself. DynamoDB's limit is 2048."""
A_DAY = 86_400
"""How much longer than its retention a held record stays out of reach of DynamoDB's deletion."""
OF_SESSIONS = re.compile("(session:[0-9a-f]{32})(:[0-9a-f:]+)?")
"""The keys of client sessions, and of what belongs to them. Keys of effects have a ``|`` in them, these have none."""
MOST_WATCHED = 16_384

Version = tuple[int, int]
"""Of a claim: its fence, and which of its renewals."""


class Kept(Record):
    """A record as it was read: which version of a held one it was (the attribute ``l``), and when.

    Versions differ also where a clock that stands gave both the same times.
    """

    held: str
    seen_at: float

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) is True and getattr(other, "held", self.held) == self.held

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = Record.__hash__


def item_of(record: Record, lease: float, version: int, times: Item, result: Item) -> Item:
    """A record as it is stored."""
    key, state, owner, fence, fingerprint, lease_until, attempts, _, _, once = record
    item: Item = {KEY: {"S": item_key(key)}, "s": number(state), "f": number(fence)}
    if item[KEY]["S"] != key:
        item["K"] = {"S": key}
    if fingerprint:
        item["p"] = {"B": fingerprint}
    if attempts != 1:
        item["a"] = number(attempts)
    if once:
        item["m"] = number(1)
    if owner:
        item |= {"o": {"B": owner}} | held_until(lease_until, lease, version)
    return item | times | result


def held_until(lease_until: float, lease: float, version: int) -> Item:
    """What changes of an item when its lease is renewed."""
    return {"l": {"S": f"{float(lease)!r} {float(lease_until)!r} {version}"}}


def held_by(owner: bytes, fence: int) -> Item:
    """What the item of a claim has. Only what is PENDING has an owner."""
    return {"o": {"B": owner}, "f": number(fence)}


def same_as(record: Kept) -> Item:
    """What an item has that is as it was read. A fence is in each state once, but held it may be renewed."""
    same = {"s": number(record.state), "f": number(record.fence)}
    return same | {"l": {"S": record.held}} if record.owner else same


def ending_of(name: str, completion: Completion, kept: Item) -> Change:
    """What ends a claim if it is held as the completion says. ``kept``: its times, and its result."""
    values = {"s": number(completion.state)} | kept
    has_answer = completion.state in (State.COMPLETED, State.FAILED)  # else a journal has to be kept
    past = ("o", "l", EXPIRY, "e", *(("r", "n", "d") if has_answer else ()))
    removed = tuple(attribute for attribute in past if attribute not in values)
    no_journal: dict[str, None] = {} if has_answer else {"r": None, "n": None}
    return Change(name, values, removed, {**held_by(completion.owner, completion.fence), **no_journal})


def lease_of(item: Item) -> tuple[float, float, int]:
    """The lease in seconds, its end by its owner's clock, and the version."""
    lease, until, version = item["l"]["S"].split(" ")
    return float(lease), float(until), int(version)


def times_of(record: Record, now: float, skew: float) -> Item:
    """When a record may be forgotten: later than asked, so that clocks that differ by ``skew`` agree that it is over,
    and so much later than it was made that the fence of the key's next life is higher by any of them.
    """
    if not is_expired(record, math.inf):
        return {"e": number(record.expires_at)}
    expires_at = max(record.expires_at, now + skew + 1) + skew
    return {EXPIRY: number(math.ceil(expires_at) + (A_DAY if record.owner else 0))}


def record_of(
    item: Item, now: float, lease_ends: Callable[[str, Version, float, float, float], float]
) -> Kept:
    """The record of an item, without the parts of a large result. ``lease_ends`` says when a held one's lease does."""
    try:
        state, fence = STATES[item["s"]["N"]], int(item["f"]["N"])
        key = key_of(item)
        owner, lease_until, held = NOBODY, 0.0, ""
        expires_at = seconds(item[EXPIRY] if EXPIRY in item else item["e"])
        if "o" in item:
            owner = item["o"]["B"]
            expires_at -= A_DAY if EXPIRY in item else 0
            lease, until, version = lease_of(item)
            lease_until = lease_ends(key, (fence, version), lease, until, now)
            held = item["l"]["S"]
        fingerprint = item["p"]["B"] if "p" in item else b""
        attempts = int(item["a"]["N"]) if "a" in item else 1
        result = item["r"]["B"] if "r" in item else None
    except (KeyError, ValueError, TypeError) as error:
        raise not_ours(item) from error
    fields = (key, state, owner, fence, fingerprint, lease_until, attempts, result, expires_at, "m" in item)
    record: Kept = make(Kept, fields)
    record.held, record.seen_at = held, now
    return record


class Glance(NamedTuple):
    """A step of this store alone: whether a claim has ended, as far as a read tells that costs half and may be late."""

    key: str
    fence: int


def has_ended(item: Item, fence: int) -> bool:
    """Whether an item is not, or no longer, this claim's."""
    return "o" not in item or item.get("f") != number(fence)


def with_result(record: Kept, result: bytes) -> Kept:
    """The record with a result that was not in its item."""
    whole = record._replace(result=result)
    whole.held, whole.seen_at = record.held, record.seen_at
    return whole


def not_ours(item: Item) -> StoreMismatch:
    """What to say of an item that is no record."""
    return StoreMismatch(
        "The item of this key is no record: another program's, or of a newer effectonce. Nothing was changed. Give "
        "effectonce a table of its own.",
        key=item.get(KEY, {}).get("S"),
    )


def number(value: float) -> dict[str, str]:
    """A number as DynamoDB takes it."""
    return {"N": repr(value) if type(value) is float else str(int(value))}


def seconds(value: dict[str, str]) -> float:
    """A number of DynamoDB's."""
    return float(value["N"])


def key_of(item: Item) -> str:
    """The key of an item's record."""
    key: str = item.get("K", item[KEY])["S"]
    return key


def item_key(key: str) -> str:
    """What a record's key is in the table. Keys of effects have a ``|`` in them, those made here have none."""
    if len(key) <= LONGEST_KEY // 4 or len(key.encode()) <= LONGEST_KEY:
        return key
    return f"key:{sha256(key.encode()).hexdigest()}"


def part_key(name: str, index: int) -> str:
    """The key of a part of a large result."""
    return f"part:{name}:{index}"


def is_part(item: Item) -> bool:
    """Whether an item is a part of a result, and no record."""
    return "s" not in item and item[KEY]["S"].startswith("part:")


def is_record(item: Item) -> bool:
    """Whether an item is a record, and no part of one nor a session's."""
    return not is_part(item) and session_of(item) is None


def session_of(item: Item) -> str | None:
    """The key of the session that an item is, or belongs to."""
    found = OF_SESSIONS.fullmatch(item[KEY]["S"])
    return found[1] if found else None


def size_of(item: Item) -> int:
    """About as many bytes as DynamoDB counts."""
    return sum(len(name) + len(next(iter(value.values()))) for name, value in item.items())


class Watch(NamedTuple):
    """A version of a claim, and the end of its lease on both clocks as it was when the watch began."""

    version: Version
    until: float
    deadline: float


class Watches:
    """Which versions of claims this process has seen, and since when on its monotonic clock.

    The oldest are forgotten when there are too many: their watch begins again, and a takeover comes later.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._watched: dict[str, Watch] = {}

    def begin(self, key: str, version: Version, lease: float, until: float) -> Watch:
        """Watch a version from now on."""
        watch = Watch(version, until, self._monotonic() + lease)
        with self._lock:
            self._watched.pop(key, None)
            self._watched[key] = watch
            if len(self._watched) > MOST_WATCHED:
                del self._watched[next(iter(self._watched))]
        return watch

    def end(self, key: str) -> None:
        """Nobody holds this key any more."""
        with self._lock:
            self._watched.pop(key, None)

    def is_past(self, key: str, fence: int) -> bool:
        """Whether a later claim of this key has been seen."""
        watch = self._watched.get(key)
        return watch is not None and watch.version[0] > fence

    def lease_ends(self, key: str, version: Version, lease: float, until: float, now: float) -> float:
        """When a lease ends: not after now only if this very version has been watched for all of it.

        A version that is not watched yet is from now on.
        """
        watch = self._watched.get(key)
        if watch is None or watch.version != version:
            watch = self.begin(key, version, lease, now + lease)
        left = watch.deadline - self._monotonic()
        if left <= 0:
            return min(watch.until, now)
        set_meanwhile = abs(watch.until - now - left) > 1.0  # the wall clock
        return now + left if set_meanwhile or watch.until <= now else watch.until

    def lease_seems_to_end(self, key: str, version: Version, lease: float, until: float, now: float) -> float:
        """The same for those who only look: of what is not watched they are told what its holder's clock says."""
        watch = self._watched.get(key)
        if watch is None or watch.version != version:
            return until
        return self.lease_ends(key, version, lease, until, now)
