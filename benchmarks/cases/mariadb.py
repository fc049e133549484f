"""MariaDB against PyMySQL and a pool of asyncmy. No floors are set for it, and no rival has such a store."""

from __future__ import annotations

from functools import partial

from benchmarks.cases.base import RAW, Case, ours

_case = partial(Case, group="mariadb", store="mariadb", server="mariadb", rows=(RAW, *ours()))
_crowd = partial(_case, tasks=64, step=256, operations=16_384, budget_seconds=0.4, slices=2)

CASES = (
    _case(name="mariadb-new", title="MariaDB, 1 caller, new", op="new", budget_seconds=0.3),
    _case(name="mariadb-dup", title="MariaDB, 1 caller, dup", op="dup", prefill=1_000),
    _crowd(name="mariadb-new-64", title="MariaDB, asyncio, 64 callers (raw: a pool of 16), new", op="new"),
    _crowd(
        name="mariadb-dup-64",
        title="MariaDB, asyncio, 64 callers (raw: a pool of 16), dup",
        op="dup",
        prefill=2_000,
    ),
)
