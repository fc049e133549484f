"""The usual code on MariaDB: a table of keys, a marker that becomes an answer, two transactions around the work."""

from __future__ import annotations

import json
from typing import Any

import asyncmy
import pymysql

from benchmarks.workers.base import Counter, Setup
from benchmarks.workers.forms import Forms, key_by_key, key_by_key_on_loop
from benchmarks.workers.raw_mariadb import POOL, address_of

TABLE = """
CREATE TABLE IF NOT EXISTS idempotency_keys (
    `key` VARCHAR(255) PRIMARY KEY, status VARCHAR(20) NOT NULL, response JSON,
    created_at DATETIME NOT NULL DEFAULT CURRENT_TIMESTAMP)
"""
LOOK = "SELECT status, response FROM idempotency_keys WHERE `key` = %s"
MARK = "INSERT INTO idempotency_keys (`key`, status) VALUES (%s, 'processing')"
ANSWER = "UPDATE idempotency_keys SET status = 'completed', response = %s WHERE `key` = %s"


def open_forms(setup: Setup) -> Forms:
    """Five round trips for a new key, two for a duplicate: a transaction begins with its first statement."""
    counter = Counter()
    handle, ahandle = counter.handle, counter.ahandle
    connection = pymysql.connect(**address_of(setup.url))
    cursor = connection.cursor()
    cursor.execute(TABLE)
    pool: Any = None

    def once(key: str) -> Any:
        if cursor.execute(LOOK, (key,)):
            connection.commit()
            return _answer(cursor.fetchone())
        cursor.execute(MARK, (key,))
        connection.commit()
        response = handle(key)
        cursor.execute(ANSWER, (json.dumps(response), key))
        connection.commit()
        return response

    async def aonce(key: str) -> Any:
        async with pool.acquire() as borrowed, borrowed.cursor() as its:
            if await its.execute(LOOK, (key,)):
                await borrowed.commit()
                return _answer(await its.fetchone())
            await its.execute(MARK, (key,))
            await borrowed.commit()
            response = await ahandle(key)
            await its.execute(ANSWER, (json.dumps(response), key))
            await borrowed.commit()
        return response

    async def aopen() -> None:
        nonlocal pool
        pool = await asyncmy.create_pool(**address_of(setup.url), minsize=POOL, maxsize=POOL)

    async def aclose() -> None:
        pool.close()
        await pool.wait_closed()

    return Forms(
        counter=counter,
        run=key_by_key(once),
        arun=key_by_key_on_loop(aonce),
        close=connection.close,
        aopen=aopen,
        aclose=aclose,
    )


def _answer(found: Any) -> Any:
    status, response = found
    if status == "processing":
        raise RuntimeError("it is being processed")
    return json.loads(response)
