"""The usual code on DynamoDB: an item for each key, put as a marker and updated with the answer."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from time import time
from typing import Any

from benchmarks.workers.base import Counter, Setup
from benchmarks.workers.dynamodb_table import THREADS, make_table, open_client, table_of
from benchmarks.workers.forms import Forms, key_by_key, key_by_key_on_loop
from benchmarks.workers.raw_sqlite import KEEP_SECONDS

KEY = "idempotency_key"


def open_forms(setup: Setup) -> Forms:
    """Three requests for a new key, one for a duplicate. On an event loop all of it is done on a thread."""
    counter, threads = Counter(), ThreadPoolExecutor(THREADS)
    handle = counter.handle
    client, table = open_client(setup.url), table_of(setup.url)
    make_table(client, table, KEY)

    def once(key: str) -> Any:
        name = {KEY: {"S": key}}
        found = client.get_item(TableName=table, Key=name).get("Item")
        if found is not None:
            if found["status"]["S"] == "IN_PROGRESS":
                raise RuntimeError("it is being processed")
            return json.loads(found["response"]["S"])
        client.put_item(
            TableName=table,
            Item={
                **name,
                "status": {"S": "IN_PROGRESS"},
                "expires_at": {"N": str(int(time() + KEEP_SECONDS))},
            },
            ConditionExpression=f"attribute_not_exists({KEY})",
        )
        response = handle(key)
        client.update_item(
            TableName=table,
            Key=name,
            UpdateExpression="SET #status = :status, #response = :response",
            ExpressionAttributeNames={"#status": "status", "#response": "response"},
            ExpressionAttributeValues={
                ":status": {"S": "COMPLETED"},
                ":response": {"S": json.dumps(response)},
            },
        )
        return response

    async def aonce(key: str) -> Any:
        return await asyncio.get_running_loop().run_in_executor(threads, once, key)

    return Forms(
        counter=counter, run=key_by_key(once), arun=key_by_key_on_loop(aonce), close=threads.shutdown
    )
