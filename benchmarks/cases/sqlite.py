"""The SQLite store against held connections that send the bare statements."""

from __future__ import annotations

from benchmarks.cases.base import RAW, Case, Row, growth_case, ours, purge_case

EXACTLY_ONCE_FULL = Row(
    "exactly-once", "exactly_once", "full", note="set to FULL from outside; its own is NORMAL"
)

CASES = (
    Case(
        name="sqlite-new",
        title="SQLite FULL, 1 thread, new",
        group="sqlite",
        store="sqlite",
        op="new",
        rows=(RAW, *ours(floor=0.9), EXACTLY_ONCE_FULL, Row("DBOS", "dbos")),
        operations=1_000,
        budget_seconds=0.2,
    ),
    Case(
        name="sqlite-new-16",
        title="SQLite FULL, 16 threads, new, 50 each",
        group="sqlite",
        store="sqlite",
        op="new",
        rows=(RAW, *ours(floor=8.0), EXACTLY_ONCE_FULL, Row("DBOS", "dbos", operations=320, note="20 each")),
        threads=16,
        # Never less, not even in a quick run: with fewer, the last sleeper's bad luck is all there is to see.
        operations=800,
        slices=2,
    ),
    Case(
        name="sqlite-new-16-timed",
        title="SQLite FULL, 16 threads, new, all they can (for information)",
        group="sqlite",
        store="sqlite",
        op="new",
        rows=(RAW, *ours(), EXACTLY_ONCE_FULL, Row("DBOS", "dbos")),
        threads=16,
        operations=100_000,
        budget_seconds=1.0,
        slices=1,
        is_timed=True,
        is_full_only=True,
    ),
    Case(
        name="sqlite-dup",
        title="SQLite, 1 thread, dup",
        group="sqlite",
        store="sqlite",
        op="dup",
        rows=(RAW, *ours(floor=0.4), Row("exactly-once", "exactly_once"), Row("DBOS", "dbos", prefill=300)),
        prefill=1_000,
    ),
    Case(
        name="sqlite-bytes",
        title="SQLite, bytes per key (36-char key, 102-byte result)",
        group="sqlite",
        store="sqlite",
        op="bytes",
        rows=(
            RAW,
            Row("raw + expiry index", "raw", "indexed"),
            Row("effectonce", "effectonce", limit=215.0),
            Row("exactly-once", "exactly_once"),
            Row("DBOS", "dbos", operations=1_000, note="few keys, because it is slow"),
        ),
        unit="bytes",
        operations=100_000,
        slices=1,
        repetitions=1,
        is_fixed=True,
    ),
    Case(
        name="sqlite-wait-threads",
        title="SQLite FULL, a waiting duplicate, threads (for information)",
        group="sqlite",
        store="sqlite",
        op="wait",
        rows=(
            Row("effectonce", "effectonce", "threads", note="includes the commit of the result"),
            Row("exactly-once", "exactly_once", "threads", note="polls"),
        ),
        operations=40,
        budget_seconds=0.3,
        slices=2,
    ),
)

PURGE = purge_case(
    "sqlite-purge",
    "SQLite",
    "sqlite",
    expired=100_000,
    # Three times as slow at most.
    within=3.0,
    # Few enough that the expired keys last for all repetitions.
    operations=1_000,
    repetitions=3,
    is_full_only=True,
)


def growth(keys: int) -> tuple[Case, ...]:
    """New and duplicate calls at many keys."""
    return tuple(growth_case("sqlite", "SQLite", op, keys) for op in ("new", "dup"))
