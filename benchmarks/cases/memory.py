"""The memory store against a dict under a lock."""

from __future__ import annotations

from benchmarks.cases.base import RAW, Case, Row, growth_case, ours

SCANS = "scans all its records at each claim"
RIVALS = (
    Row("exactly-once", "exactly_once"),
    Row("idemkit asyncio", "idemkit", "asyncio", note=SCANS),
    Row("idemkit sync", "idemkit", "sync", note=SCANS),
)

CASES = (
    Case(
        name="memory-new",
        title="memory, 1 thread, new",
        group="memory",
        store="memory",
        op="new",
        rows=(RAW, *ours(floor=0.25), *RIVALS),
    ),
    Case(
        name="memory-dup",
        title="memory, 1 thread, dup",
        group="memory",
        store="memory",
        op="dup",
        rows=(RAW, *ours(), *RIVALS),
        prefill=1_000,
    ),
    Case(
        name="memory-wait-threads",
        title="memory, a waiting duplicate, threads",
        group="memory",
        store="memory",
        op="wait",
        rows=(
            Row("raw", "raw", "threads"),
            Row("effectonce", "effectonce", "threads", limit=100e-6),
            Row("exactly-once", "exactly_once", "threads", note="polls"),
            Row("idemkit sync", "idemkit", "threads"),
        ),
        operations=40,
        budget_seconds=0.3,
        slices=2,
    ),
    Case(
        name="memory-wait-asyncio",
        title="memory, a waiting duplicate, asyncio",
        group="memory",
        store="memory",
        op="wait",
        rows=(
            Row("raw", "raw", "asyncio"),
            Row("effectonce", "effectonce", "asyncio", limit=100e-6),
            Row("exactly-once", "exactly_once", "asyncio", note="polls"),
            Row("idemkit asyncio", "idemkit", "asyncio"),
        ),
        operations=40,
        budget_seconds=0.3,
        slices=2,
    ),
)


def growth(keys: int) -> tuple[Case, ...]:
    """New and duplicate calls at many keys."""
    return tuple(growth_case("memory", "memory", op, keys) for op in ("new", "dup"))
