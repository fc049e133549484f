"""Atomic mode: the record in the user's own transaction, over the user's own connection.

``receiver.on(connection)`` is the receiver for calls whose effects are in the transaction that the connection is in:
claim, effects and result commit together or not at all. ``adapt`` gives any connection the one shape that everything
here speaks to. A driver is never imported for it: whoever has such a connection has imported its driver.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any, Final

from ..errors import UsageError
from ._retrying import aretrying, retrying
from .base import Adapter, Dialect, Result, code_of, is_retryable

__all__ = ["Adapter", "Dialect", "Result", "adapt", "aretrying", "code_of", "is_retryable", "retrying"]

ADAPTERS: Final = {
    ("sqlite3", "Connection"): "_sqlite3:SQLite3",
    ("psycopg", "Connection"): "_psycopg:Psycopg",
    ("psycopg", "AsyncConnection"): "_psycopg:AsyncPsycopg",
    ("asyncpg", "Connection"): "_asyncpg:Asyncpg",
    ("asyncpg", "PoolConnectionProxy"): "_asyncpg:Asyncpg",
    ("pymysql", "Connection"): "_pymysql:PyMySQL",
    ("asyncmy", "Connection"): "_asyncmy:Asyncmy",
    ("sqlalchemy", "Connection"): "_sqlalchemy:SQLAlchemy",
    ("sqlalchemy", "Session"): "_sqlalchemy:SQLAlchemy",
    ("sqlalchemy", "scoped_session"): "_sqlalchemy:SQLAlchemy",
    ("sqlalchemy", "AsyncConnection"): "_sqlalchemy:AsyncSQLAlchemy",
    ("sqlalchemy", "AsyncSession"): "_sqlalchemy:AsyncSQLAlchemy",
    ("sqlalchemy", "async_scoped_session"): "_sqlalchemy:AsyncSQLAlchemy",
    ("django", "BaseDatabaseWrapper"): "_django:Django",
    ("django", "ConnectionProxy"): "_django:Django",
}
"""By the package and the name of a connection's class, or of one that it inherits from."""


def adapt(connection: Any) -> Adapter:
    """The adapter of a connection, session or database wrapper; an Adapter is its own."""
    kind: Any = type(connection)
    return _adapter_of(kind)(connection)


@lru_cache(maxsize=64)
def _adapter_of(kind: type[Any]) -> Callable[[Any], Adapter]:
    if issubclass(kind, Adapter):
        return lambda adapter: adapter
    for each in kind.__mro__:
        found = ADAPTERS.get((each.__module__.partition(".")[0], each.__name__))
        if found is not None:
            module, _, name = found.partition(":")
            adapter: Callable[[Any], Adapter] = getattr(import_module(f".{module}", __name__), name)
            return adapter
    raise UsageError(
        f"{kind.__module__}.{kind.__qualname__} is no connection that effectonce knows. Known are those of sqlite3, "
        "psycopg, asyncpg, PyMySQL and asyncmy, SQLAlchemy's connections and sessions, and django.db.connection. A "
        "pool or an engine is no connection: take one out of it first."
    )
