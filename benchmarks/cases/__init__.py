"""What is measured: one file per store, each with its contenders and the floors they are held to."""

from __future__ import annotations

from benchmarks.cases import memory, parts, sqlite
from benchmarks.cases.base import Case, Row

__all__ = ["Case", "Row", "all_cases"]


def all_cases(growth_keys: int) -> tuple[Case, ...]:
    """Everything there is, in the order of the report. Growth goes to that many keys."""
    return (
        *memory.CASES,
        *sqlite.CASES,
        *parts.CASES,
        *memory.growth(growth_keys),
        *sqlite.growth(growth_keys),
        sqlite.PURGE,
    )
