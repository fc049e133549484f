"""Which version may follow which. Pure: no I/O, no clock; everything else in this package asks here.

**A write** wants to take a row from version ``expected`` to the next one:

    | the row                                  | verdict    | what happens                          |
    |------------------------------------------|------------|---------------------------------------|
    | was last written under this very name    | REPEATED   | nothing: this update was made already |
    | is at ``expected``                       | WRITE      | it is written, one version higher     |
    | is anywhere else, or is not there        | STALE      | nothing: somebody else was quicker    |

**An event** of an entity says which version it makes of it:

    | its version is                           | verdict    | what happens                          |
    |------------------------------------------|------------|---------------------------------------|
    | not above what was applied               | OLD        | it is skipped: a repeat, or too late  |
    | the next one                             | DUE        | it is applied                         |
    | further ahead                            | GAP        | it waits for those before it          |
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple, TypeVar

T = TypeVar("T")

HIGHEST = 2**63 - 1
"""What a column of 64 bits holds."""


class Write(Enum):
    """What becomes of a write."""

    REPEATED = "repeated"
    WRITE = "write"
    STALE = "stale"


class Arrival(Enum):
    """What becomes of an event."""

    OLD = "old"
    DUE = "due"
    GAP = "gap"


class Row(NamedTuple):
    """What is known of a row: its version, and under which name it was last written."""

    version: int | None
    by: str | None = None


def decide_write(row: Row | None, expected: int, by: str | None) -> Write:
    """What a write may do to this row."""
    if row is not None and by is not None and row.by == by:
        return Write.REPEATED
    if row is not None and row.version == expected:
        return Write.WRITE
    return Write.STALE


def decide_event(applied: int, version: int) -> Arrival:
    """What to do with an event of this version, when those up to ``applied`` have been applied."""
    if version <= applied:
        return Arrival.OLD
    return Arrival.DUE if version == applied + 1 else Arrival.GAP


def run_after(applied: int, waiting: Iterable[tuple[int, T]]) -> list[tuple[int, T]]:
    """Of what waits, in order of version: those that follow without a gap."""
    run: list[tuple[int, T]] = []
    for version, event in waiting:
        if version != applied + 1 + len(run):
            break
        run.append((version, event))
    return run
