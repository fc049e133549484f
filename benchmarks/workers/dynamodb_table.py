"""A DynamoDB table as its contenders need it: a client, the table itself, many items at once, and what they weigh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any
from urllib.parse import parse_qs, urlsplit

import boto3
from botocore.config import Config

from benchmarks.workers.base import Fill, chunks

THREADS = 16
"""On which a crowd's requests are done, since boto3 blocks; and connections for as many."""
MOST_WRITES = 25
"""Of a batch, in one request."""
FILLERS = 3
"""Requests that fill a table at once: one is made, one is on its way, and one is being answered."""

Item = dict[str, dict[str, Any]]


def address_of(url: str) -> dict[str, str | None]:
    """Where the server is that the URL names, as boto3 wants to be told."""
    options = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
    return {"region_name": options.get("region"), "endpoint_url": options.get("endpoint")}


def open_client(url: str, **settings: Any) -> Any:
    """boto3's client for the server that the URL names. Its own ten connections would be too few for a crowd."""
    config = Config(max_pool_connections=THREADS, **settings)
    return boto3.client("dynamodb", **address_of(url), config=config)


def table_of(url: str) -> str:
    """The name of the table that the URL names."""
    return urlsplit(url).netloc


def make_table(client: Any, table: str, key: str) -> None:
    """Make a table with this key, paid per request, unless it is there."""
    if table in client.list_tables()["TableNames"]:
        return
    client.create_table(
        TableName=table,
        KeySchema=[{"AttributeName": key, "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": key, "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    client.get_waiter("table_exists").wait(TableName=table)


class Filler:
    """Puts many items into a table, whatever is there. What is put is known to be right, so nobody checks it again."""

    def __init__(self, url: str) -> None:
        self._client, self._table = open_client(url, parameter_validation=False), table_of(url)
        self._threads = ThreadPoolExecutor(FILLERS)

    def put(self, items: Sequence[Item]) -> None:
        """Put all of them."""
        for reply in self._threads.map(self._put, chunks(items, MOST_WRITES)):
            assert not reply["UnprocessedItems"]

    def _put(self, items: Sequence[Item]) -> Any:
        puts = [{"PutRequest": {"Item": item}} for item in items]
        return self._client.batch_write_item(RequestItems={self._table: puts})


def like_the_first(url: str, add: Fill) -> Fill:
    """Fill an empty table with the item that `add` makes of the first key, put again under each key's own name.

    By way of a store's own verbs, two conditional writes for each key, it takes four times as long.
    """
    filler, client, table = Filler(url), open_client(url), table_of(url)
    first, model = "", Item()

    def fill(keys: Sequence[str]) -> None:
        nonlocal first, model
        if not first:
            first = keys[0]
            add([first])
            (model,) = client.scan(TableName=table)["Items"]
        filler.put([_renamed(model, first, key) for key in keys])

    return fill


def _renamed(item: Item, key: str, other: str) -> Item:
    return {
        name: {"S": value["S"].replace(key, other)} if "S" in value else value for name, value in item.items()
    }


def bytes_of_items(url: str) -> float:
    """What all items of the table weigh, as Amazon counts them for every read and write."""
    client = open_client(url)
    pages = client.get_paginator("scan").paginate(TableName=table_of(url))
    return float(sum(size_of(item) for page in pages for item in page["Items"]))


def size_of(item: Item) -> int:
    """An item's size: names and values. https://docs.aws.amazon.com/amazondynamodb/latest/developerguide/CapacityUnitCalculations.html"""
    return sum(len(name.encode()) + _size_of_value(value) for name, value in item.items())


def _size_of_value(value: dict[str, Any]) -> int:
    ((kind, content),) = value.items()
    match kind:
        case "S":
            return len(content.encode())
        case "B":
            return len(content)
        case "N":
            return _size_of_number(content)
        case "M":
            return 3 + len(content) + size_of(content)
        case "L":
            return 3 + len(content) + _sum_of(content)
        case "BOOL" | "NULL":
            return 1
    raise NotImplementedError(f"no contender has stored a {kind} so far")


def _sum_of(values: Iterable[dict[str, Any]]) -> int:
    return sum(map(_size_of_value, values))


def _size_of_number(text: str) -> int:
    """One byte, and one for each two digits, without zeros at either end."""
    digits = "".join(map(str, Decimal(text).as_tuple().digits)).strip("0")
    return 1 + (len(digits) + 1) // 2
