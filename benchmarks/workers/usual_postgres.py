"""The usual code on PostgreSQL: a table of keys, a marker that becomes an answer, two transactions around the work."""

from __future__ import annotations

from typing import Any, LiteralString

import psycopg
from psycopg.types.json import Jsonb
from psycopg_pool import AsyncConnectionPool

from benchmarks.workers.base import Counter, Setup
from benchmarks.workers.forms import Forms, key_by_key, key_by_key_on_loop
from benchmarks.workers.raw_postgres import POOL

TABLE: LiteralString = """
CREATE TABLE IF NOT EXISTS idempotency_keys (
    key text PRIMARY KEY, status text NOT NULL, response jsonb, created_at timestamptz NOT NULL DEFAULT now())
"""
LOOK: LiteralString = "SELECT status, response FROM idempotency_keys WHERE key = %s"
MARK: LiteralString = "INSERT INTO idempotency_keys (key, status) VALUES (%s, 'processing')"
ANSWER: LiteralString = "UPDATE idempotency_keys SET status = 'completed', response = %s WHERE key = %s"


def open_forms(setup: Setup) -> Forms:
    """Seven round trips for a new key, three for a duplicate: the driver begins each transaction by itself."""
    counter = Counter()
    handle, ahandle = counter.handle, counter.ahandle
    connection = psycopg.connect(setup.url)
    connection.execute(TABLE)
    connection.commit()
    pool = AsyncConnectionPool(setup.url, min_size=POOL, max_size=POOL, open=False)

    def once(key: str) -> Any:
        found = connection.execute(LOOK, (key,)).fetchone()
        if found is not None:
            connection.commit()
            return _answer(found)
        connection.execute(MARK, (key,))
        connection.commit()
        response = handle(key)
        connection.execute(ANSWER, (Jsonb(response), key))
        connection.commit()
        return response

    async def aonce(key: str) -> Any:
        async with pool.connection() as borrowed:
            found = await (await borrowed.execute(LOOK, (key,))).fetchone()
            if found is not None:
                return _answer(found)
            await borrowed.execute(MARK, (key,))
            await borrowed.commit()
            response = await ahandle(key)
            await borrowed.execute(ANSWER, (Jsonb(response), key))
        return response

    return Forms(
        counter=counter,
        run=key_by_key(once),
        arun=key_by_key_on_loop(aonce),
        close=connection.close,
        aopen=lambda: pool.open(wait=True),
        aclose=pool.close,
    )


def _answer(found: tuple[Any, ...]) -> Any:
    status, response = found
    if status == "processing":
        raise RuntimeError("it is being processed")
    return response
