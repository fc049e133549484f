"""Which version may follow which. Pure: no I/O, no clock; everything else in this package asks here.

**A write** wants to take a row from version ``expected`` to the next one:

    | the row                                  | verdict    | what happens                          |
    |------------------------------------------|------------|---------------------------------------|
    | has had an update of this name           | REPEATED   | nothing: this update was made already |
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
from typing import TypeVar

T = TypeVar("T")

HIGHEST = 2**63 - 1
"""What a column of 64 bits holds."""


class Arrival(Enum):
    """What becomes of an event."""

    OLD = "old"
    DUE = "due"
    GAP = "gap"


def may_write(actual: int | None, expected: int) -> bool:
    """Whether a write may be made to a row at ``actual``; None: there is none, or it has no version."""
    return actual == expected


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
