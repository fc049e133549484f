"""The raw limit of MariaDB: PyMySQL and asyncmy as they come, one table, one statement to claim and one to complete."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from time import time
from typing import Any
from urllib.parse import urlsplit

import asyncmy
import pymysql

from benchmarks.workers.base import ENCODED, Counter, Setup
from benchmarks.workers.forms import Forms
from benchmarks.workers.raw_sqlite import KEEP_SECONDS, LEASE_SECONDS

POOL = 16
TABLE = """
CREATE TABLE IF NOT EXISTS records (
    `key` VARCHAR(255) CHARACTER SET ascii PRIMARY KEY, state TINYINT NOT NULL, expires DOUBLE NOT NULL,
    owner BINARY(16), result BLOB)
"""
CLAIM = "INSERT IGNORE INTO records VALUES (%s, 0, %s, %s, NULL)"
READ = "SELECT state, expires, result FROM records WHERE `key` = %s"
COMPLETE = (
    "UPDATE records SET state = 1, expires = %s, owner = NULL, result = %s "
    "WHERE `key` = %s AND state = 0 AND owner = %s"
)
# It answers with the keys that are new.
CLAIM_MANY = "INSERT IGNORE INTO records VALUES {} RETURNING `key`"
# Each with a result of its own.
COMPLETE_MANY = (
    "UPDATE records SET state = 1, expires = %s, owner = NULL, result = CASE `key` {} END "
    "WHERE `key` IN %s AND state = 0 AND owner = %s"
)
FILL_MANY = "INSERT INTO records VALUES {}"
ROW, WHEN = "(%s, %s, %s, %s, %s)", "WHEN %s THEN %s"
RESULT = ENCODED.encode()


def open_forms(setup: Setup) -> Forms:
    """Two statements for a new key, each a transaction. A duplicate is a SELECT: an INSERT could not answer it."""
    counter = Counter()
    handle, ahandle = counter.handle, counter.ahandle
    connection = pymysql.connect(**address_of(setup.url), autocommit=True)
    cursor = connection.cursor()
    execute = cursor.execute
    execute(TABLE)
    pool: Any = None

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            owner = random.randbytes(16)
            execute(CLAIM, (key, time() + LEASE_SECONDS, owner))
            handle(key)
            execute(COMPLETE, (time() + KEEP_SECONDS, RESULT, key, owner))

    def read(keys: Iterable[str]) -> None:
        for key in keys:
            execute(READ, (key,))
            cursor.fetchone()

    async def arun(keys: Iterable[str]) -> None:
        for key in keys:
            owner = random.randbytes(16)
            async with pool.acquire() as borrowed, borrowed.cursor() as its:
                await its.execute(CLAIM, (key, time() + LEASE_SECONDS, owner))
            await ahandle(key)
            async with pool.acquire() as borrowed, borrowed.cursor() as its:
                await its.execute(COMPLETE, (time() + KEEP_SECONDS, RESULT, key, owner))

    async def aread(keys: Iterable[str]) -> None:
        for key in keys:
            async with pool.acquire() as borrowed, borrowed.cursor() as its:
                await its.execute(READ, (key,))
                await its.fetchone()

    async def aopen() -> None:
        nonlocal pool
        pool = await asyncmy.create_pool(**address_of(setup.url), autocommit=True, minsize=POOL, maxsize=POOL)

    async def aclose() -> None:
        pool.close()
        await pool.wait_closed()

    def batch(keys: Sequence[str]) -> None:
        owner, until = random.randbytes(16), time() + LEASE_SECONDS
        execute(
            CLAIM_MANY.format(", ".join([ROW] * len(keys))),
            _flat((key, 0, until, owner, None) for key in keys),
        )
        mine = [key for (key,) in cursor.fetchall()]
        for key in mine:
            handle(key)
        results = _flat((key, RESULT) for key in mine)
        execute(
            COMPLETE_MANY.format(" ".join([WHEN] * len(mine))), [time() + KEEP_SECONDS, *results, mine, owner]
        )

    def fill(keys: Sequence[str]) -> None:
        until = time() + KEEP_SECONDS
        execute(
            FILL_MANY.format(", ".join([ROW] * len(keys))),
            _flat((key, 1, until, None, RESULT) for key in keys),
        )

    is_dup = setup.op == "dup"
    return Forms(
        counter=counter,
        run=read if is_dup else run,
        arun=aread if is_dup else arun,
        batch=batch,
        fill=fill,
        close=connection.close,
        aopen=aopen,
        aclose=aclose,
    )


def _flat(rows: Iterable[Iterable[Any]]) -> list[Any]:
    return [value for row in rows for value in row]


def address_of(url: str) -> dict[str, Any]:
    """Where the database is that the URL names, as both drivers want to be told."""
    place = urlsplit(url)
    return {
        "host": place.hostname,
        "port": place.port or 3306,
        "user": place.username,
        "password": place.password or "",
        "database": place.path.strip("/"),
    }
