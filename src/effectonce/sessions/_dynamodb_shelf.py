"""What client sessions are in a DynamoDB table: items, what may be said of them, and what of them may be forgotten.

The key of a session is ``session:`` and its id. Its attributes:

    e  epoch      w  mark      d  its lease in seconds      u  the lease's end
    h  the same where a running request holds the session for longer than its own lease
    q  the numbers that are remembered

A request has a record's attributes; its key is the session's, and its number. It has no time to live, because that it
is not there has to prove that it was never seen. Nobody deletes one that can be claimed: it leaves below the mark, or
when its session is over, which none is twice.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Final

from .._records import Record
from ..errors import StoreError, StoreMismatch
from ..stores import _dynamodb_items as items
from ..stores._dynamodb_items import Kept, number
from ..stores._dynamodb_parts import LARGEST_PART
from ..stores._dynamodb_table import MOST_WRITES
from ..stores._dynamodb_writes import KEY, Drop, Item, Update, Where, Write
from ..stores.dynamodb import DynamoDBStore
from ._rules import is_dropped

FOREVER: Final[Item] = {"e": number(10**12)}
"""When a request expires, for whoever takes it for a record."""


def name_of(session: str, request: int | None = None) -> str:
    """The key of a session's item, or of a request's."""
    return f"session:{session}" if request is None else f"session:{session}:{request}"


def numbers_of(home: Item) -> list[int]:
    """The numbers that a session remembers."""
    return [int(request) for request in home.get("q", {}).get("NS", ())]


def as_seen(home: Item) -> Where:
    """What a session has that nobody has changed."""
    return {attribute: home.get(attribute) for attribute in "ewuhq"}


def until_of(home: Item) -> float:
    """The end of a session's lease."""
    return max(items.seconds(home["u"]), items.seconds(home["h"]) if "h" in home else 0.0)


def parts_names(name: str, item: Item) -> list[str]:
    """The keys of the parts of a large result."""
    return [f"{name}:{item['d']['S']}:{index}" for index in range(int(item["n"]["N"]))] if "n" in item else []


class Shelf:
    """The sessions in a store's table. Everything here blocks."""

    def __init__(self, store: DynamoDBStore) -> None:
        self.store, self.table = store, store._table
        self._hand: Item | None = {KEY: {"S": name_of(secrets.token_hex(16))}}

    # Requests

    def item_of(self, name: str, record: Record, now: float, result: Item) -> Item:
        """A request as it is stored."""
        lease, version = record.lease_until - now, self.store._stamp(now)
        return items.item_of(record._replace(key=name), lease, version, FOREVER, result)

    def parts_of(self, name: str, result: bytes) -> Item:
        """Write a large result, or journal, into items of its own."""
        starts = range(0, len(result), LARGEST_PART)
        large: Item = {"d": {"S": sha256(result).hexdigest()}, "n": number(len(starts))}
        for key, start in zip(parts_names(name, large), starts, strict=True):
            self.table.overwrite({KEY: {"S": key}, "r": {"B": result[start : start + LARGEST_PART]}})
        return large

    def kept(self, item: Item, now: float) -> Kept:
        """The record of a request's item."""
        return items.record_of(item, now, self.store._watches.lease_ends)

    def whole(self, item: Item, kept: Kept) -> bytes:
        """The result of a request that is in items of its own."""
        names = parts_names(kept.key, item)
        parts = self.table.read_many(names)
        result = b"".join(parts[name]["r"]["B"] for name in names if name in parts)
        if sha256(result).hexdigest() != item["d"]["S"]:
            raise StoreMismatch(
                "Parts of this stored result are missing: somebody deleted them.", key=kept.key
            )
        return result

    # What may be forgotten

    def end(self, item: Item) -> bool:
        """End a session if it still is as it was read: whether it was. Nothing runs in it any more."""
        if self.table.write(Drop(item[KEY]["S"], as_seen(item))):
            return False
        with suppress(StoreError):  # it is over; others will come by
            self.forget(item[KEY]["S"], numbers_of(item), is_over=True)
        return True

    def forget(self, name: str, numbers: Sequence[int], is_over: bool = False) -> list[str]:
        """Delete requests, unless they run or are in doubt in a session that is not over: the numbers that are gone."""
        names = {f"{name}:{request}": str(request) for request in numbers}
        found, now = self.table.read_many([*names]), self.store.clock()
        drops: list[Write] = []
        for item in found.values():
            kept = self.kept(item, now)
            if is_over or is_dropped(kept, now):
                drops += [Drop(part, {}) for part in parts_names(kept.key, item)]
                drops.append(Drop(kept.key, items.same_as(kept)))
        left = found.keys() - self._drop(drops)
        return [request for key, request in names.items() if key not in left]

    def forget_below(self, name: str, numbers: Sequence[int]) -> None:
        """Delete requests below a session's mark, and let it remember them no longer."""
        if gone := self.forget(name, numbers):
            values: Item = {":gone": {"NS": gone}}
            self.table.write(Update(name, "DELETE q :gone", f"attribute_exists({KEY})", values))

    def _drop(self, drops: Sequence[Write]) -> set[str]:
        gone: set[str] = set()
        for first in range(0, len(drops), MOST_WRITES):
            some = drops[first : first + MOST_WRITES]
            outcomes = self.table.write_many(some)
            gone |= {drop.key for drop, outcome in zip(some, outcomes, strict=True) if not outcome}
        return gone

    def sweep(self, limit: int) -> int:
        """Look at the next items, end sessions whose lease is over, and drop what such have left: how many ended."""
        page, self._hand = next(self.table.pages(self._hand, Limit=limit))
        ours = {item[KEY]["S"]: home for item in page if (home := items.session_of(item))}
        over = [item for item in page if ours.get(item[KEY]["S"]) == item[KEY]["S"] and self.is_over(item)]
        unseen = {home for home in ours.values() if home not in ours}
        gone = unseen - self.table.read_many([*unseen]).keys()  # no session comes back
        self._drop([Drop(key, {}) for key, home in ours.items() if home in gone])
        return sum(map(self.end, over))

    def is_over(self, item: Item) -> bool:
        """Whether a session may be ended, as far as this process's clock can tell."""
        return until_of(item) + self.store._skew <= self.store.clock()
