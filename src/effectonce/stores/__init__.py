"""Stores: where records live. ``open_store`` finds the right one for a URL."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from ..errors import UsageError
from ._circuit import Breaker, Circuit
from ._guarded import GuardedStore, guarded
from ._urls import shown, split
from .base import Features, Health, Store, StoreStats

__all__ = [
    "Breaker",
    "Circuit",
    "Features",
    "GuardedStore",
    "Health",
    "Store",
    "StoreStats",
    "guarded",
    "open_store",
]

SCHEMES = {
    "memory": "memory:MemoryStore",
    "sqlite": "sqlite:SQLiteStore",
    **dict.fromkeys(("redis", "rediss", "redis+cluster", "rediss+cluster"), "redis:RedisStore"),
    **dict.fromkeys(("valkey", "valkeys", "valkey+cluster", "valkeys+cluster"), "redis:RedisStore"),
    "postgresql": "postgres:PostgresStore",
    "postgres": "postgres:PostgresStore",
    "postgresql+asyncpg": "postgres:PostgresStore",
    "mysql": "mysql:MySQLStore",
    "mariadb": "mysql:MySQLStore",
    "dynamodb": "dynamodb:DynamoDBStore",
}


def open_store(url: str | os.PathLike[str] | Store) -> Store:
    """Open the store that a URL names: ``sqlite:///effects.db``, ``memory://``.

    A Path is a SQLite file. A Store object is taken as it is.
    """
    if isinstance(url, Store):
        return url
    if isinstance(url, os.PathLike):
        from .sqlite import SQLiteStore

        return SQLiteStore(os.fspath(url))
    if not isinstance(url, str):
        raise UsageError(f'{url!r} is neither a Store nor a URL such as "sqlite:///effects.db".')
    from urllib.parse import parse_qsl

    kind: Any = kind_of(url)
    store: Store = kind.from_url(url, dict(parse_qsl(split(url).query, keep_blank_values=True)))
    return store


def kind_of(url: str) -> type[Store]:
    """The class of the store that a URL names. Nothing is opened."""
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme not in SCHEMES:
        raise UsageError(
            f"{shown(url)!r} has no known scheme. Known are {', '.join(f'{s}://' for s in SCHEMES)}."
        )
    module, _, name = SCHEMES[scheme].partition(":")
    kind: type[Store] = getattr(import_module(f".{module}", __package__), name)
    return kind
