"""DynamoDB, by an engine that is emulated, against boto3's client.

There is no case of purging: DynamoDB deletes what has expired by itself.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from benchmarks.cases.base import RAW, USUAL, WITHIN, Case, Row, batches, growth_case, ours

POWERTOOLS = Row("Powertools", "powertools")
IDEMKIT = Row("idemkit", "idemkit")
IDEMKIT_SYNC = Row("idemkit sync", "idemkit")
IDEMKIT_ASYNCIO = Row("idemkit asyncio", "idemkit", "asyncio")
ON_THREADS = "on 16 threads"

_case = partial(Case, group="dynamodb", store="dynamodb", server="dynamodb", budget_seconds=0.5)
_alone = partial(_case, rows=(RAW, *ours(floor=0.95), POWERTOOLS, IDEMKIT_SYNC, IDEMKIT_ASYNCIO, USUAL))
_crowd = partial(
    _case,
    rows=(
        replace(RAW, note=ON_THREADS),
        *ours(),
        replace(POWERTOOLS, note=ON_THREADS),
        IDEMKIT,
        replace(USUAL, note=f"{USUAL.note}, {ON_THREADS}"),
    ),
    tasks=64,
    step=128,
    operations=4_096,
    slices=2,
)

CASES = (
    _alone(name="dynamodb-new", title="DynamoDB, 1 caller, new", op="new"),
    _alone(name="dynamodb-dup", title="DynamoDB, 1 caller, dup", op="dup", prefill=100),
    _crowd(name="dynamodb-new-64", title="DynamoDB, asyncio, 64 callers, new (for information)", op="new"),
    _crowd(
        name="dynamodb-dup-64",
        title="DynamoDB, asyncio, 64 callers, dup (for information)",
        op="dup",
        prefill=500,
    ),
    _case(
        name="dynamodb-batch",
        title="DynamoDB, batch of 100, new (for information)",
        op="batch",
        rows=(
            replace(RAW, note="statements of PartiQL, 25 in a request"),
            Row("raw, one by one", "raw", "each", note=f"conditional puts and updates, {ON_THREADS}"),
            *batches(),
        ),
        step=100,
    ),
    _case(
        name="dynamodb-bytes",
        title="DynamoDB, bytes per item as Amazon counts them (36-char key, 102-byte result, expiry set)",
        op="new",
        rows=(RAW, *ours(), POWERTOOLS, IDEMKIT_ASYNCIO, USUAL),
        unit="bytes",
        gauge="dynamodb-items",
        # All are alike, but for the digits of their times.
        operations=500,
        slices=1,
        repetitions=1,
        is_fixed=True,
    ),
)


def growth(keys: int) -> tuple[Case, ...]:
    """New and duplicate calls at many keys."""
    more = {"server": "dynamodb", "floor": 1 / WITHIN, "budget_seconds": 0.5}
    return tuple(growth_case("dynamodb", "DynamoDB", op, keys, **more) for op in ("new", "dup"))
