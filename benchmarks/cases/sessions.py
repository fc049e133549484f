"""Client sessions against a key for each request: what a bounded memory costs."""

from __future__ import annotations

from functools import partial

from benchmarks.cases.base import Case, Row

ROWS = (
    Row("a key each", "effectonce", "process", baseline=""),
    Row("a session", "effectonce", "session", baseline="a key each"),
)
STORES = (
    ("sqlite", "SQLite FULL", ""),
    ("redis", "Redis", "valkey"),
    ("postgres", "PostgreSQL", "postgres"),
    ("dynamodb", "DynamoDB", "dynamodb"),
)

_case = partial(Case, group="sessions", op="new", rows=ROWS)
_crowd = partial(_case, tasks=64, step=256, operations=16_384, budget_seconds=0.3, slices=2)

CASES = tuple(
    case
    for store, label, server in STORES
    for case in (
        _case(
            name=f"sessions-{store}",
            title=f"{label}, requests of a client, 1 caller (ratio to a key each)",
            store=store,
            server=server,
        ),
        _crowd(
            name=f"sessions-{store}-64",
            title=f"{label}, requests of 64 clients on an event loop (likewise)",
            store=store,
            server=server,
        ),
    )
)
