"""The shape of a case.

A value is always a cost (seconds or bytes of one operation) and a ratio always baseline / value, so more is better
everywhere. A floor bounds the ratio from below; a limit bounds the value itself from above. Both are those of
PERFORMANCE.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Row:
    """One contender in one case. `contender` names its worker module, `variant` is for that module to read."""

    label: str
    contender: str
    variant: str = ""
    floor: float | None = None
    floor_from: str | None = None
    """The floor is at least that row's own ratio, less a little for noise: "no worse than the raw store"."""
    limit: float | None = None
    baseline: str = "raw"
    operations: int | None = None
    prefill: int | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows that take turns, and how much each does per turn."""

    name: str
    title: str
    group: str
    store: str
    op: str
    rows: tuple[Row, ...]
    unit: str = "seconds"
    threads: int = 1
    tasks: int = 0
    """Callers on one event loop; 0 means blocking callers."""
    step: int = 1
    """The operations of a slice are a multiple of this: a batch, or some for each caller."""
    gauge: str = ""
    """A value is what an operation adds to this gauge of the server, instead of the time it takes."""
    server: str = ""
    """The server it runs on, as tests/servers calls it."""
    operations: int = 5_000
    """The most operations in a slice."""
    budget_seconds: float = 0.1
    """A slice is cut to about this long, so that a slow rival can't stretch the run."""
    slices: int = 4
    repetitions: int | None = None
    prefill: int = 0
    warm_up: int = 0
    """Operations of each new process before it is measured, where a slice's are too few to know the store by."""
    is_fixed: bool = False
    """Exactly `operations` per slice, without calibration: exact counts and one-shot figures."""
    is_timed: bool = False
    """With threads: a slice lasts for its budget, instead of until each thread has done its share."""
    is_full_only: bool = False

    @property
    def is_renewed(self) -> bool:
        """Whether each repetition has new processes: where a time is taken, and a store is quickly filled or stays."""
        return not self.is_fixed and not self.gauge and (self._is_quickly_filled or bool(self.server))

    @property
    def is_kept(self) -> bool:
        """Whether what one repetition's processes have put into their stores is there for the next one's."""
        return self.is_renewed and not self._is_quickly_filled

    @property
    def _is_quickly_filled(self) -> bool:
        return max([self.prefill, *(row.prefill or 0 for row in self.rows)]) <= QUICKLY_FILLED

    def whole_steps(self, operations: float, most: int) -> int:
        """About that many operations, in whole steps, at least one and at most `most`."""
        return max(1, int(min(operations, most)) // self.step) * self.step


QUICKLY_FILLED = 10_000
"""Keys that a store has within moments."""
RAW = Row("raw", "raw")
USUAL = Row("usual code", "usual", note="by hand, unfenced")
WITHIN = 1.3
"""How much more a claim may cost on a server with two million keys than with a thousand."""


def ours(**bounds: float) -> tuple[Row, Row]:
    """Both everyday forms of effectonce, held to the same floor or limit."""
    return (
        Row("effectonce process", "effectonce", "process", **bounds),
        Row("effectonce decorated", "effectonce", "decorated", **bounds),
    )


def batches(**bounds: float) -> tuple[Row, Row]:
    """A batch as it comes, with handlers side by side in threads, and one whose handlers take turns."""
    return (
        Row("effectonce", "effectonce", **bounds),
        Row("effectonce in turn", "effectonce", "in turn", note="concurrency=1", **bounds),
    )


def growth_case(
    store: str, label: str, op: str, keys: int, *, floor: float | None = None, **more: Any
) -> Case:
    """The cost at many keys against the same contender's cost at a thousand, both stores open side by side."""
    return Case(
        name=f"{store}-growth-{op}",
        title=f"{label}, {op}, {keys:,} keys (ratio to 1,000 keys)",
        group=store,
        store=store,
        op=op,
        rows=(
            Row("raw, few", "raw", prefill=1_000, baseline=""),
            Row("raw, many", "raw", prefill=keys, baseline="raw, few"),
            Row("effectonce, few", "effectonce", "process", prefill=1_000, baseline=""),
            Row(
                "effectonce, many",
                "effectonce",
                "process",
                prefill=keys,
                baseline="effectonce, few",
                floor=floor,
                floor_from="raw, many",
            ),
        ),
        # Few new keys, or the small store would not stay small.
        operations=100 if op == "new" else 2_000,
        is_full_only=True,
        **more,
    )


def purge_case(name: str, label: str, store: str, expired: int, *, within: float, **more: Any) -> Case:
    """The slowest hundredth of claims while that many expired keys are purged, `within` so many times the quiet one."""
    return Case(
        name=name,
        title=f"{label}, claim p99 while {expired:,} expired keys are purged (ratio to quiet)",
        group=store,
        store=store,
        op="purge",
        rows=(
            Row("quiet", "effectonce", "quiet", baseline=""),
            Row("purged by traffic", "effectonce", "traffic", baseline="quiet", floor=1 / within),
            Row("purge() in a thread", "effectonce", "thread", baseline="quiet", floor=1 / within),
        ),
        prefill=expired,
        slices=1,
        is_fixed=True,
        **more,
    )


def server_purges(store: str, label: str, *, within: float) -> tuple[Case, Case]:
    """Purging on a server, of few keys and of many."""
    # Few enough operations that the expired keys last for all repetitions.
    purge = partial(
        purge_case, label=label, store=store, within=within, server=store, operations=500, repetitions=5
    )
    return (
        purge(f"{store}-purge", expired=100_000),
        purge(f"{store}-purge-million", expired=1_000_000, is_full_only=True),
    )
