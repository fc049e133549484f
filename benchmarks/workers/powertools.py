"""Powertools for AWS Lambda: `@idempotent_function`, over Redis and over DynamoDB."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from aws_lambda_powertools.utilities.idempotency import (
    DynamoDBPersistenceLayer,
    IdempotencyConfig,
    idempotent_function,
)

from benchmarks.workers.base import RESULT, Counter, Setup, Subject
from benchmarks.workers.dynamodb_table import THREADS, make_table, open_client, table_of
from benchmarks.workers.forms import Forms, subject
from benchmarks.workers.raw_sqlite import KEEP_SECONDS, LEASE_SECONDS

DISTRIBUTION = "aws-lambda-powertools"


def open_subject(setup: Setup) -> Subject:
    """Open one case of Powertools."""
    return subject(setup, open_forms(setup))


def open_forms(setup: Setup) -> Forms:
    """It is blocking only, so that an event loop needs threads for it, as it does for boto3. A duplicate of a running
    call is refused, not made to wait.
    """
    counter = Counter()
    tick, layer, threads = counter.tick, LAYERS[setup.store](setup.url), ThreadPoolExecutor(THREADS)
    config = IdempotencyConfig(expires_after_seconds=int(KEEP_SECONDS))
    config.register_lambda_context(_Context())

    @idempotent_function(data_keyword_argument="order_id", persistence_store=layer, config=config)
    def charge(order_id: str) -> dict[str, Any]:
        tick()
        return RESULT

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            charge(order_id=key)

    async def arun(keys: Iterable[str]) -> None:
        do = asyncio.get_running_loop().run_in_executor
        for key in keys:
            await do(threads, partial(charge, order_id=key))

    return Forms(counter=counter, run=run, arun=arun, close=threads.shutdown)


class _Context:
    """What it wants to know of a Lambda: how long a claim is to hold. Without it, it warns at each call."""

    def get_remaining_time_in_millis(self) -> int:
        return int(LEASE_SECONDS * 1000)


def _redis_layer(url: str) -> Any:
    import redis
    from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer

    return CachePersistenceLayer(client=redis.Redis.from_url(url, decode_responses=True))


def _dynamodb_layer(url: str) -> Any:
    client, table = open_client(url), table_of(url)
    make_table(client, table, "id")
    return DynamoDBPersistenceLayer(table_name=table, boto3_client=client)


LAYERS: dict[str, Callable[[str], Any]] = {"redis": _redis_layer, "dynamodb": _dynamodb_layer}
