"""PostgreSQL against psycopg, which sends one prepared statement to claim and one to complete."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from benchmarks.cases.base import RAW, USUAL, WITHIN, Case, Row, batches, growth_case, ours, server_purges

SELECT = Row("raw, SELECT alone", "raw", "select", note="answers, but could not claim")
ROTATING = Row("effectonce process, rotate=6h", "effectonce", "rotating", note="a ring of three slots")
EXACTLY_ONCE = Row("exactly-once", "exactly_once")
IDEMKIT = Row("idemkit", "idemkit")
IDEMKIT_SYNC = Row("idemkit sync", "idemkit")
IDEMKIT_ASYNCIO = Row("idemkit asyncio", "idemkit", "asyncio")
DBOS = Row("DBOS", "dbos")

_case = partial(Case, group="postgres", store="postgres", server="postgres")
_crowd = partial(_case, tasks=64, step=256, operations=16_384, budget_seconds=0.4, slices=2)
_exact = partial(_case, unit="bytes", is_fixed=True)
_processor = partial(
    _case,
    rows=(RAW, *ours(), ROTATING),
    gauge="postgres-processor",
    tasks=64,
    operations=65_536,  # the kernel counts hundredths of a second
    slices=1,
    repetitions=3,
    is_fixed=True,
)

CASES = (
    _case(
        name="postgres-new",
        title="PostgreSQL, 1 caller, new",
        op="new",
        rows=(RAW, *ours(floor=0.9), ROTATING, EXACTLY_ONCE, IDEMKIT_SYNC, IDEMKIT_ASYNCIO, DBOS, USUAL),
        budget_seconds=0.3,
    ),
    _case(
        name="postgres-dup",
        title="PostgreSQL, 1 caller, dup",
        op="dup",
        rows=(
            RAW,
            SELECT,
            *ours(floor=0.9),
            ROTATING,
            EXACTLY_ONCE,
            IDEMKIT_SYNC,
            IDEMKIT_ASYNCIO,
            DBOS,
            USUAL,
        ),
        prefill=500,
        budget_seconds=0.2,
    ),
    _case(
        name="postgres-atomic",
        title="PostgreSQL, one row of work in the user's transaction, new",
        op="new",
        rows=(
            Row("raw", "raw", "by hand", note="BEGIN, claim, work, complete, COMMIT"),
            Row("the same work without effectonce", "raw", "alone", note="unprotected"),
            Row("effectonce atomic, commit=True", "effectonce", "atomic, commit", floor=1.0),
            Row(
                "effectonce atomic, user's block", "effectonce", "atomic", note="BEGIN and COMMIT by the user"
            ),
            Row("DBOS, transactional step", "dbos", "transaction"),
        ),
        budget_seconds=0.3,
    ),
    _crowd(
        name="postgres-new-64",
        title="PostgreSQL, asyncio, 64 callers (raw: a pool of 16), new",
        op="new",
        rows=(RAW, *ours(floor=5.0), EXACTLY_ONCE, IDEMKIT, USUAL),
    ),
    _crowd(
        name="postgres-dup-64",
        title="PostgreSQL, asyncio, 64 callers (raw: a pool of 16), dup",
        op="dup",
        rows=(RAW, SELECT, *ours(floor=8.0), EXACTLY_ONCE, IDEMKIT, USUAL),
        prefill=1_000,
    ),
    _processor(
        name="postgres-processor-new",
        title="PostgreSQL, its own processors per new key, 64 callers (for information)",
        op="new",
    ),
    _processor(
        name="postgres-processor-dup",
        title="PostgreSQL, its own processors per duplicate, 64 callers (for information)",
        op="dup",
        prefill=1_000,
    ),
    _case(
        name="postgres-batch",
        title="PostgreSQL, batch of 100, new (for information)",
        op="batch",
        rows=(RAW, *batches(), replace(ROTATING, label="effectonce, rotate=6h")),
        step=100,
        budget_seconds=0.2,
    ),
    _exact(
        name="postgres-bytes",
        title="PostgreSQL, bytes per key, index included (36-char key, 102-byte result)",
        op="new",
        rows=(
            RAW,
            *ours(limit=300.0),
            ROTATING,
            *(replace(row, operations=5_000) for row in (EXACTLY_ONCE, IDEMKIT_ASYNCIO)),
            replace(DBOS, operations=1_000, note="few keys, because it is slow"),
            USUAL,
        ),
        gauge="postgres-size",
        # With fewer, it shows which pages of the index happen to have been split.
        operations=20_000,
        slices=1,
        repetitions=1,
    ),
    _exact(
        name="postgres-wal-new",
        title="PostgreSQL, bytes of log per new key",
        op="new",
        rows=(RAW, *ours(limit=650.0), ROTATING, EXACTLY_ONCE, IDEMKIT_ASYNCIO, DBOS),
        gauge="postgres-wal",
        operations=1_000,
        slices=1,
        repetitions=3,
    ),
    _exact(
        name="postgres-wal-dup",
        title="PostgreSQL, bytes of log per duplicate",
        op="dup",
        rows=(RAW, Row("effectonce", "effectonce", limit=0.0), EXACTLY_ONCE, IDEMKIT_ASYNCIO, DBOS),
        gauge="postgres-wal",
        prefill=100,
        operations=1_000,
        slices=1,
        repetitions=3,
    ),
    _exact(
        name="postgres-dead-rows",
        title="PostgreSQL, dead rows per new key (for information)",
        op="new",
        rows=(RAW, Row("effectonce", "effectonce"), EXACTLY_ONCE, IDEMKIT_ASYNCIO, DBOS),
        unit="rows",
        gauge="postgres-dead-rows",
        operations=3_000,
        slices=1,
        repetitions=1,
    ),
    _exact(
        name="postgres-dead-rows-million",
        title="PostgreSQL, dead rows per new key, 64 callers, a million keys (for information)",
        op="new",
        rows=(
            Row("raw", "raw", operations=100_000, note="100,000 keys"),
            Row("effectonce", "effectonce", "process"),
        ),
        unit="rows",
        gauge="postgres-dead-rows",
        tasks=64,
        operations=1_000_000,
        slices=1,
        repetitions=1,
        is_full_only=True,
    ),
    _case(
        name="postgres-wait",
        title="PostgreSQL, a waiting duplicate, in another process",
        op="wait",
        rows=(
            RAW,
            Row("effectonce", "effectonce", limit=2e-3),
            Row("exactly-once", "exactly_once", note="polls"),
            IDEMKIT_SYNC,
        ),
        operations=40,
        budget_seconds=0.6,
        slices=2,
    ),
)


PURGES = server_purges("postgres", "PostgreSQL", within=1.5)


ACQUAINTED = 20_000
"""Reads of random keys after which a new process of the server has mapped the memory that two million of them fill."""


def growth(keys: int) -> tuple[Case, ...]:
    """New and duplicate calls at many keys.

    Each connection has a process of the server's. On which core it wakes up is worth more to a duplicate than all that
    growth costs, so these are measured with many of them.
    """
    of = partial(growth_case, "postgres", "PostgreSQL", keys=keys, server="postgres", floor=1 / WITHIN)
    return of(op="new"), of(op="dup", warm_up=ACQUAINTED, repetitions=11)
