"""The raw limit of Redis: redis-py as it comes, one script to claim and one to complete, nothing around them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import redis
import redis.asyncio

from benchmarks.workers.base import ENCODED, Counter, Setup
from benchmarks.workers.forms import Forms
from benchmarks.workers.raw_sqlite import KEEP_SECONDS, LEASE_SECONDS
from benchmarks.workers.waiting import Body

LEASE_MS, KEEP_MS = int(LEASE_SECONDS * 1000), int(KEEP_SECONDS * 1000)
DONE = b"C" + ENCODED.encode()

CLAIM = """
local found = redis.call('GET', KEYS[1])
if found then return found end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return false
"""
# Only the owner's claim may become a result.
COMPLETE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""
ANNOUNCE = COMPLETE.replace("return 1", "redis.call('PUBLISH', KEYS[1], 1) return 1")


def open_forms(setup: Setup) -> Forms:
    """Every form of the raw client. Two round trips for a new key, one for a duplicate."""
    counter = Counter()
    handle, ahandle = counter.handle, counter.ahandle
    client, aclient = redis.Redis.from_url(setup.url), redis.asyncio.Redis.from_url(setup.url)
    claim, complete, announce = map(client.script_load, (CLAIM, COMPLETE, ANNOUNCE))

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            owner = _owner()
            if client.evalsha(claim, 1, key, owner, LEASE_MS) is None:
                handle(key)
                client.evalsha(complete, 1, key, owner, DONE, KEEP_MS)

    async def arun(keys: Iterable[str]) -> None:
        for key in keys:
            owner = _owner()
            if await aclient.evalsha(claim, 1, key, owner, LEASE_MS) is None:
                await ahandle(key)
                await aclient.evalsha(complete, 1, key, owner, DONE, KEEP_MS)

    def batch(keys: Sequence[str]) -> None:
        owners = [_owner() for _ in keys]
        pipeline = client.pipeline(transaction=False)
        for key, owner in zip(keys, owners, strict=True):
            pipeline.evalsha(claim, 1, key, owner, LEASE_MS)
        for key, owner, found in zip(keys, owners, pipeline.execute(), strict=True):
            if found is None:
                handle(key)
                pipeline.evalsha(complete, 1, key, owner, DONE, KEEP_MS)
        pipeline.execute()

    def call(key: str, body: Body) -> Any:
        owner = _owner()
        found = client.evalsha(claim, 1, key, owner, LEASE_MS)
        if found is None:
            body()
            client.evalsha(announce, 1, key, owner, DONE, KEEP_MS)
        elif found[:1] == b"P":
            _wait(client, key)

    return Forms(
        counter=counter,
        run=run,
        arun=arun,
        batch=batch,
        call=call,
        fill=batch,
        close=client.close,
        aclose=aclient.aclose,
    )


def _owner() -> bytes:
    return b"P" + random.randbytes(16)


def _wait(client: redis.Redis, key: str) -> None:
    """Listen first and look after that, so that an end in between isn't missed."""
    with client.pubsub(ignore_subscribe_messages=True) as ear:
        ear.subscribe(key)
        ear.get_message(timeout=1)
        while client.get(key)[:1] == b"P":  # type: ignore[index]
            ear.get_message(timeout=1)
