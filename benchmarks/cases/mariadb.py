"""MariaDB against PyMySQL and a pool of asyncmy. No floors are set for calls, and no rival has such a store."""

from __future__ import annotations

from functools import partial

from benchmarks.cases.base import RAW, USUAL, WITHIN, Case, batches, growth_case, ours, server_purges

_case = partial(Case, group="mariadb", store="mariadb", server="mariadb", rows=(RAW, *ours(), USUAL))
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
    _case(
        name="mariadb-batch",
        title="MariaDB, batch of 100, new (for information)",
        op="batch",
        rows=(RAW, *batches()),
        step=100,
        budget_seconds=0.2,
    ),
    _case(
        name="mariadb-bytes",
        title="MariaDB, bytes per key in pages of rows (36-char key, 102-byte result)",
        op="new",
        unit="bytes",
        gauge="mariadb-pages",
        # A crowd, because many keys are needed: with few, it shows which pages happen to have been split.
        tasks=64,
        operations=50_000,
        slices=1,
        repetitions=1,
        is_fixed=True,
    ),
)

PURGES = server_purges("mariadb", "MariaDB", within=2.0)


def growth(keys: int) -> tuple[Case, ...]:
    """New and duplicate calls at many keys."""
    return tuple(
        growth_case("mariadb", "MariaDB", op, keys, server="mariadb", floor=1 / WITHIN)
        for op in ("new", "dup")
    )
