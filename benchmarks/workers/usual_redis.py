"""The usual code on Redis: a result as JSON under one key, a marker under another.

Who outlives the marker's time-out deletes the next one's marker; who dies before the result leaves no trace.
"""

from __future__ import annotations

import json
from time import time
from typing import Any

import redis
import redis.asyncio

from benchmarks.workers.base import Counter, Setup
from benchmarks.workers.forms import Forms, key_by_key, key_by_key_on_loop
from benchmarks.workers.raw_sqlite import KEEP_SECONDS, LEASE_SECONDS

LEASE, KEEP = int(LEASE_SECONDS), int(KEEP_SECONDS)


def open_forms(setup: Setup) -> Forms:
    """Four round trips for a new key, one for a duplicate."""
    counter = Counter()
    handle, ahandle = counter.handle, counter.ahandle
    client = redis.Redis.from_url(setup.url, decode_responses=True)
    aclient = redis.asyncio.Redis.from_url(setup.url, decode_responses=True)

    def once(key: str) -> Any:
        name, marker = f"idempotency:{key}", f"idempotency:{key}:lock"
        stored: Any = client.get(name)
        if stored is not None:
            return json.loads(stored)["response"]
        if not client.set(marker, "processing", nx=True, ex=LEASE):
            raise RuntimeError("it is being processed")
        response = handle(key)
        client.set(name, _stored(response), ex=KEEP)
        client.delete(marker)
        return response

    async def aonce(key: str) -> Any:
        name, marker = f"idempotency:{key}", f"idempotency:{key}:lock"
        stored: Any = await aclient.get(name)
        if stored is not None:
            return json.loads(stored)["response"]
        if not await aclient.set(marker, "processing", nx=True, ex=LEASE):
            raise RuntimeError("it is being processed")
        response = await ahandle(key)
        await aclient.set(name, _stored(response), ex=KEEP)
        await aclient.delete(marker)
        return response

    return Forms(
        counter=counter,
        run=key_by_key(once),
        arun=key_by_key_on_loop(aonce),
        close=client.close,
        aclose=aclient.aclose,
    )


def _stored(response: dict[str, Any]) -> str:
    return json.dumps({"status": "completed", "created_at": time(), "response": response})
