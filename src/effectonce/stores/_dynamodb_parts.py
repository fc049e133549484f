"""Results that are too large for an item: in items of their own, which are written first and outlive the record.

A record names them by a hash of its key and the result, so that a part that is missing, or another's, is noticed.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

from .._records import Record
from ..errors import StoreMismatch
from . import _dynamodb_items as items
from ._dynamodb_items import Kept, number
from ._dynamodb_table import Table
from ._dynamodb_writes import KEY, Item

LARGEST_PART: Final = 380_000
"""Bytes of a result, or of a part of one, in one item. DynamoDB's limit is 400 KiB, names and all."""


def stored(table: Table, record: Record, times: Item) -> Item:
    """What a record's item has of its result. A large one goes into its parts first."""
    result = record.result
    if result is None:
        return {}
    if len(result) <= LARGEST_PART:
        return {"r": {"B": result}}
    name = sha256(record.key.encode() + result).hexdigest()
    starts = range(0, len(result), LARGEST_PART)
    expiry = {attribute: number(items.seconds(at) + items.A_DAY) for attribute, at in times.items()}
    for index, start in enumerate(starts):
        part: Item = {KEY: {"S": items.part_key(name, index)}}
        table.overwrite(part | {"r": {"B": result[start : start + LARGEST_PART]}} | expiry)
    return {"d": {"S": name}, "n": number(len(starts))}


def whole(table: Table, item: Item, record: Kept) -> Kept:
    """A record with its result, also if that is in parts."""
    if "n" not in item:
        return record
    name = item["d"]["S"]
    keys = [items.part_key(name, index) for index in range(int(item["n"]["N"]))]
    parts = table.read_many(keys)
    result = b"".join(parts[key]["r"]["B"] for key in keys if key in parts)
    if sha256(record.key.encode() + result).hexdigest() != name:
        raise StoreMismatch("Parts of this stored result are missing: somebody deleted them.", key=record.key)
    return items.with_result(record, result)
