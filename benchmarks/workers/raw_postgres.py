"""The raw limit of PostgreSQL: psycopg as it comes, one table, one prepared statement to claim and one to complete."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from time import time
from typing import LiteralString

import psycopg
from psycopg_pool import AsyncConnectionPool

from benchmarks.workers.atomic import alone, by_hand
from benchmarks.workers.base import ENCODED, Counter, Setup
from benchmarks.workers.forms import Forms
from benchmarks.workers.raw_sqlite import KEEP_SECONDS, LEASE_SECONDS
from benchmarks.workers.waiting import Body

POOL = 16
TABLE: LiteralString = """
CREATE TABLE IF NOT EXISTS records (
    key text PRIMARY KEY, state smallint NOT NULL, expires float8 NOT NULL, owner bytea, result bytea)
"""
# A duplicate's row, or no row for who has claimed it.
CLAIM: LiteralString = """
WITH added AS (INSERT INTO records VALUES (%s, 0, %s, %s) ON CONFLICT DO NOTHING)
SELECT state, expires, result FROM records WHERE key = %s
"""
READ: LiteralString = "SELECT state, expires, result FROM records WHERE key = %s"
COMPLETE: LiteralString = """
UPDATE records SET state = 1, expires = %s, owner = NULL, result = %s WHERE key = %s AND state = 0 AND owner = %s
"""
CLAIM_MANY: LiteralString = """
INSERT INTO records SELECT key, 0, %s, owner FROM unnest(%s::text[], %s::bytea[]) AS asked (key, owner)
ON CONFLICT DO NOTHING RETURNING key
"""
COMPLETE_MANY: LiteralString = """
UPDATE records SET state = 1, expires = %s, owner = NULL, result = %s
FROM unnest(%s::text[], %s::bytea[]) AS asked (key, owner)
WHERE records.key = asked.key AND state = 0 AND records.owner = asked.owner
"""
RESULT = ENCODED.encode()


def open_forms(setup: Setup) -> Forms:
    """Every form of the raw client. Two statements for a new key, one for a duplicate, each a transaction."""
    counter = Counter()
    handle, ahandle = counter.handle, counter.ahandle
    connection = psycopg.connect(setup.url, autocommit=True)
    connection.execute(TABLE)
    execute = connection.cursor().execute
    pool = AsyncConnectionPool(
        setup.url, min_size=POOL, max_size=POOL, kwargs={"autocommit": True}, open=False
    )

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            owner = random.randbytes(16)
            if execute(CLAIM, (key, time() + LEASE_SECONDS, owner, key), prepare=True).fetchone() is None:
                handle(key)
                execute(COMPLETE, (time() + KEEP_SECONDS, RESULT, key, owner), prepare=True)

    def read(keys: Iterable[str]) -> None:
        for key in keys:
            execute(READ, (key,), prepare=True).fetchone()

    async def arun(keys: Iterable[str]) -> None:
        for key in keys:
            owner = random.randbytes(16)
            async with pool.connection() as borrowed:
                claim = (key, time() + LEASE_SECONDS, owner, key)
                found = await (await borrowed.execute(CLAIM, claim, prepare=True)).fetchone()
            if found is None:
                await ahandle(key)
                async with pool.connection() as borrowed:
                    end = (time() + KEEP_SECONDS, RESULT, key, owner)
                    await borrowed.execute(COMPLETE, end, prepare=True)

    async def aread(keys: Iterable[str]) -> None:
        for key in keys:
            async with pool.connection() as borrowed:
                await (await borrowed.execute(READ, (key,), prepare=True)).fetchone()

    def batch(keys: Sequence[str]) -> None:
        owners = [random.randbytes(16) for _ in keys]
        rows = execute(CLAIM_MANY, (time() + LEASE_SECONDS, list(keys), owners), prepare=True).fetchall()
        for (key,) in rows:
            handle(key)
        execute(COMPLETE_MANY, (time() + KEEP_SECONDS, RESULT, list(keys), owners), prepare=True)

    def call(key: str, body: Body) -> None:
        owner = random.randbytes(16)
        found = execute(CLAIM, (key, time() + LEASE_SECONDS, owner, key)).fetchone()
        if found is None:
            body()
            with connection.transaction():
                execute(COMPLETE, (time() + KEEP_SECONDS, RESULT, key, owner))
                execute("SELECT pg_notify(%s, '')", (key,))
        elif found[0] == 0:
            _wait(connection, key)

    is_reading = setup.variant == "select"
    in_transaction = {"alone": alone, "by hand": by_hand}.get(setup.variant)
    chosen = read if is_reading else run
    return Forms(
        counter=counter,
        run=in_transaction(setup, counter) if in_transaction else chosen,
        arun=aread if is_reading else arun,
        batch=batch,
        call=call,
        fill=batch,
        close=connection.close,
        aopen=lambda: pool.open(wait=True),
        aclose=pool.close,
    )


def _wait(connection: psycopg.Connection, key: str) -> None:
    """Listen first and look after that, so that an end in between isn't missed."""
    connection.execute(f'LISTEN "{key}"'.encode())
    while connection.execute(READ, (key,)).fetchone()[0] == 0:  # type: ignore[index]
        for _ in connection.notifies(timeout=1, stop_after=1):
            pass
    connection.execute(f'UNLISTEN "{key}"'.encode())
