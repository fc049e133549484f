"""The raw limit of DynamoDB: boto3's client as it comes, a conditional put to claim and an update to complete."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from time import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

import boto3

from benchmarks.workers.base import ENCODED, Counter, Setup, chunks
from benchmarks.workers.forms import Forms
from benchmarks.workers.raw_sqlite import KEEP_SECONDS, LEASE_SECONDS

MOST_ITEMS = 25
"""Of a BatchWriteItem."""


def open_forms(setup: Setup) -> Forms:
    """Two requests for a new key, one for a duplicate: the put that fails returns what is there."""
    counter = Counter()
    handle = counter.handle
    client, table = open_client(setup.url), table_of(setup.url)
    make_table(client, table, "id")
    taken = client.exceptions.ConditionalCheckFailedException

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            owner = random.randbytes(16)
            try:
                client.put_item(
                    TableName=table,
                    Item=_item(key, LEASE_SECONDS, o={"B": owner}),
                    ConditionExpression="attribute_not_exists(id)",
                    ReturnValuesOnConditionCheckFailure="ALL_OLD",
                )
            except taken as found:
                assert found.response["Item"]["r"]
                continue
            handle(key)
            client.update_item(
                TableName=table,
                Key={"id": {"S": key}},
                UpdateExpression="SET r = :r, t = :t REMOVE o",
                ConditionExpression="o = :o",
                ExpressionAttributeValues={
                    ":r": {"S": ENCODED},
                    ":t": {"N": str(int(time() + KEEP_SECONDS))},
                    ":o": {"B": owner},
                },
            )

    def fill(keys: Sequence[str]) -> None:
        for chunk in chunks(keys, MOST_ITEMS):
            puts = [{"PutRequest": {"Item": _item(key, KEEP_SECONDS, r={"S": ENCODED})}} for key in chunk]
            client.batch_write_item(RequestItems={table: puts})

    return Forms(counter=counter, run=run, fill=fill)


def _item(key: str, seconds: float, **more: Any) -> dict[str, Any]:
    return {"id": {"S": key}, "t": {"N": str(int(time() + seconds))}, **more}


def open_client(url: str) -> Any:
    """boto3's client for the server that the URL names."""
    options = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
    return boto3.client("dynamodb", region_name=options.get("region"), endpoint_url=options.get("endpoint"))


def table_of(url: str) -> str:
    """The name of the table that the URL names."""
    return urlsplit(url).netloc


def make_table(client: Any, table: str, key: str) -> None:
    """Make a table with this key, paid per request."""
    client.create_table(
        TableName=table,
        KeySchema=[{"AttributeName": key, "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": key, "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    client.get_waiter("table_exists").wait(TableName=table)
