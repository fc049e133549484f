"""The raw limit of DynamoDB: boto3's client as it comes, a conditional put to claim and an update to complete."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import time
from typing import Any

from benchmarks.workers.base import ENCODED, Counter, Setup, chunks
from benchmarks.workers.dynamodb_table import (
    MOST_WRITES,
    THREADS,
    Filler,
    Item,
    make_table,
    open_client,
    table_of,
)
from benchmarks.workers.forms import Forms
from benchmarks.workers.raw_sqlite import KEEP_SECONDS, LEASE_SECONDS


def open_forms(setup: Setup) -> Forms:
    """Every form of the raw client. Two requests for a new key, one for a duplicate."""
    counter = Counter()
    handle, ahandle = counter.handle, counter.ahandle
    records, threads = _Records(setup.url), ThreadPoolExecutor(THREADS)
    claim, complete = records.claim, records.complete

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            owner = random.randbytes(16)
            if claim(key, owner):
                handle(key)
                complete(key, owner)

    async def arun(keys: Iterable[str]) -> None:
        do = asyncio.get_running_loop().run_in_executor
        for key in keys:
            owner = random.randbytes(16)
            if await do(threads, claim, key, owner):
                await ahandle(key)
                await do(threads, complete, key, owner)

    def each(keys: Sequence[str]) -> None:
        owner = random.randbytes(16)
        claimed = threads.map(lambda key: claim(key, owner), keys)
        mine = [key for key, is_mine in zip(keys, claimed, strict=True) if is_mine]
        for key in mine:
            handle(key)
        list(threads.map(lambda key: complete(key, owner), mine))

    def batch(keys: Sequence[str]) -> None:
        owner, pieces = random.randbytes(16), list(chunks(keys, MOST_WRITES))
        claimed = threads.map(lambda piece: records.claim_many(piece, owner), pieces)
        mine = [key for piece in claimed for key in piece]
        for key in mine:
            handle(key)
        list(threads.map(lambda piece: records.complete_many(piece, owner), chunks(mine, MOST_WRITES)))

    return Forms(
        counter=counter,
        run=run,
        arun=arun,
        batch=each if setup.variant == "each" else batch,
        fill=records.fill,
        close=threads.shutdown,
    )


class _Records:
    """The requests. A claim that fails returns what is there, so a duplicate is answered by it."""

    def __init__(self, url: str) -> None:
        self._client, self._table, self._filler = open_client(url), table_of(url), Filler(url)
        make_table(self._client, self._table, "id")
        self._taken = self._client.exceptions.ConditionalCheckFailedException

    def claim(self, key: str, owner: bytes) -> bool:
        """Whether the key is new, and this owner's now."""
        try:
            self._client.put_item(
                TableName=self._table,
                Item=_item(key, LEASE_SECONDS, o={"B": owner}),
                ConditionExpression="attribute_not_exists(id)",
                ReturnValuesOnConditionCheckFailure="ALL_OLD",
            )
        except self._taken as found:
            assert found.response["Item"]["r"]
            return False
        return True

    def complete(self, key: str, owner: bytes) -> None:
        """Put the result in place of the owner."""
        self._client.update_item(
            TableName=self._table,
            Key={"id": {"S": key}},
            UpdateExpression="SET r = :r, t = :t REMOVE o",
            ConditionExpression="o = :o",
            ExpressionAttributeValues={
                ":r": {"S": ENCODED},
                ":t": _from_now(KEEP_SECONDS),
                ":o": {"B": owner},
            },
        )

    def claim_many(self, keys: Sequence[str], owner: bytes) -> list[str]:
        """Those of up to 25 keys that are new, and this owner's now."""
        insert = f"INSERT INTO \"{self._table}\" VALUE {{'id': ?, 't': ?, 'o': ?}}"
        until, by = _from_now(LEASE_SECONDS), {"B": owner}
        replies = self._each(insert, [[{"S": key}, until, by] for key in keys])
        return [key for key, reply in zip(keys, replies, strict=True) if "Error" not in reply]

    def complete_many(self, keys: Sequence[str], owner: bytes) -> None:
        """Put a result in place of the owner, for up to 25 keys."""
        update = f'UPDATE "{self._table}" SET r = ? SET t = ? REMOVE o WHERE id = ? AND o = ?'
        until, by = _from_now(KEEP_SECONDS), {"B": owner}
        self._each(update, [[{"S": ENCODED}, until, {"S": key}, by] for key in keys])

    def _each(self, statement: str, parameters: Sequence[Any]) -> Any:
        statements = [{"Statement": statement, "Parameters": each} for each in parameters]
        return self._client.batch_execute_statement(Statements=statements)["Responses"]

    def fill(self, keys: Sequence[str]) -> None:
        """Put completed records."""
        self._filler.put([_item(key, KEEP_SECONDS, r={"S": ENCODED}) for key in keys])


def _item(key: str, seconds: float, **more: Any) -> Item:
    return {"id": {"S": key}, "t": _from_now(seconds), **more}


def _from_now(seconds: float) -> dict[str, str]:
    return {"N": str(int(time() + seconds))}
