"""What is measured: one file per store, each with its contenders and the floors they are held to."""

from __future__ import annotations

from benchmarks.cases import (
    dynamodb,
    http,
    mariadb,
    memory,
    messaging,
    parts,
    postgres,
    redis,
    relay,
    sessions,
    sqlite,
)
from benchmarks.cases.base import Case, Row

__all__ = ["Case", "Row", "all_cases"]


def all_cases(growth_keys: int | None) -> tuple[Case, ...]:
    """Everything there is, in the order of the report. Growth goes to that many keys."""
    local_keys, server_keys = growth_keys or 1_000_000, growth_keys or 2_000_000
    return (
        *memory.CASES,
        *sqlite.CASES,
        *redis.CASES,
        *postgres.CASES,
        *mariadb.CASES,
        *dynamodb.CASES,
        *http.CASES,
        *relay.CASES,
        *messaging.CASES,
        *sessions.CASES,
        *parts.CASES,
        *memory.growth(local_keys),
        *sqlite.growth(local_keys),
        *redis.growth(server_keys),
        *postgres.growth(server_keys),
        *mariadb.growth(server_keys),
        *dynamodb.growth(server_keys),
        sqlite.PURGE,
        *postgres.PURGES,
        *mariadb.PURGES,
    )
