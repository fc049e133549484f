"""Redis and Valkey against redis-py, which sends one script to claim and one to complete."""

from __future__ import annotations

from functools import partial

from benchmarks.cases.base import RAW, USUAL, WITHIN, Case, Row, batches, growth_case, ours

POWERTOOLS = Row("Powertools", "powertools")
EXACTLY_ONCE = Row("exactly-once", "exactly_once")
IDEMKIT = Row("idemkit", "idemkit")
IDEMKIT_SYNC = Row("idemkit sync", "idemkit")
IDEMKIT_ASYNCIO = Row("idemkit asyncio", "idemkit", "asyncio")
BLOCKING = (POWERTOOLS, EXACTLY_ONCE, IDEMKIT_SYNC, IDEMKIT_ASYNCIO, USUAL)
ASYNCIO = (EXACTLY_ONCE, IDEMKIT, USUAL)

_case = partial(Case, group="redis", store="redis", server="valkey")
_crowd = partial(_case, tasks=64, step=256, operations=16_384, budget_seconds=0.3, slices=2)
_bytes = partial(
    _case,
    op="new",
    rows=(RAW, *ours(limit=300.0), POWERTOOLS, EXACTLY_ONCE, IDEMKIT_ASYNCIO, USUAL),
    unit="bytes",
    gauge="redis-memory",
    # Three quarters of a power of two: the server's tables, which double when they are full, are half-way.
    operations=24_576,
    slices=1,
    repetitions=1,
    is_fixed=True,
)

_processor = partial(
    _case,
    rows=(RAW, *ours()),
    gauge="redis-processor",
    tasks=64,
    operations=32_768,
    slices=1,
    repetitions=3,
    is_fixed=True,
)

CASES = (
    _case(name="redis-new", title="Redis, 1 caller, new", op="new", rows=(RAW, *ours(floor=1.0), *BLOCKING)),
    _case(
        name="redis-dup",
        title="Redis, 1 caller, dup",
        op="dup",
        rows=(RAW, *ours(floor=1.0), *BLOCKING),
        prefill=1_000,
    ),
    _crowd(
        name="redis-new-64",
        title="Redis, asyncio, 64 callers, new",
        op="new",
        rows=(RAW, *ours(floor=4.0), *ASYNCIO),
    ),
    _crowd(
        name="redis-dup-64",
        title="Redis, asyncio, 64 callers, dup",
        op="dup",
        rows=(RAW, *ours(floor=5.0), *ASYNCIO),
        prefill=2_000,
    ),
    _processor(
        name="redis-processor-new",
        title="Valkey, its own processor per new key, 64 callers (for information)",
        op="new",
    ),
    _processor(
        name="redis-processor-dup",
        title="Valkey, its own processor per duplicate, 64 callers (for information)",
        op="dup",
        prefill=2_000,
    ),
    _case(
        name="redis-new-16",
        title="Redis, 16 threads, new, 200 each",
        op="new",
        rows=(RAW, *ours(floor=3.0), POWERTOOLS, EXACTLY_ONCE, USUAL),
        threads=16,
        operations=3_200,
        slices=2,
    ),
    _case(
        name="redis-batch",
        title="Redis, batch of 100, new",
        op="batch",
        rows=(RAW, *batches(floor=1.0)),
        step=100,
    ),
    _bytes(name="redis-bytes", title="Valkey, bytes per key (36-char key, 102-byte result, expiry set)"),
    _bytes(name="redis-bytes-7", title="Redis 7, bytes per key (likewise)", server="redis"),
    _case(
        name="redis-wait",
        title="Redis, a waiting duplicate, in another process",
        op="wait",
        rows=(
            RAW,
            Row("effectonce", "effectonce", limit=1e-3),
            Row("exactly-once", "exactly_once", note="polls"),
            IDEMKIT_SYNC,
        ),
        operations=40,
        budget_seconds=0.6,
        slices=2,
    ),
)


def growth(keys: int) -> tuple[Case, ...]:
    """New and duplicate calls at many keys."""
    return tuple(
        growth_case("redis", "Redis", op, keys, server="valkey", floor=1 / WITHIN) for op in ("new", "dup")
    )
