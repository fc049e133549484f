"""``receiver.on(connection)``: the same receiver, with the record in the transaction that the connection is in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any, NoReturn

from .._receiver import Receiver
from ..errors import ColourMismatch, UsageError
from ..stores import Store
from . import adapt
from ._batch import run_batch
from ._flow import AtomicFlow, InTransaction
from ._own import OwnFlow
from ._own import run_batch as run_own_batch
from ._stores import TransactionStore
from .base import Adapter

STORES = {
    "sqlite": ("sqlite", "SQLiteStore", "_stores", "InSQLite"),
    "postgresql": ("postgres", "PostgresStore", "_postgres_store", "InPostgres"),
    "mysql": ("mysql", "MySQLStore", "_mysql_store", "InMySQL"),
}
"""By dialect: where the store is that such a connection may belong to, and where its form in a transaction."""


class OnConnection(Receiver):
    """A receiver for one transaction: names, policy and events are those of the receiver that it comes from.

    Make one with ``receiver.on(connection)`` for every transaction, or for every call; it costs nothing.
    """

    def __init__(self, receiver: Receiver, connection: Any, commit: bool = False) -> None:
        self.__dict__.update(receiver.__dict__)
        self.store = store = self._store_on(adapt(connection), receiver.store)
        colour: Any = InTransaction(store)
        if store.adapter.awaits:
            self.blocking, self.asyncio = AWAITING, colour
        else:
            self.blocking, self.asyncio = colour, BLOCKING
        kind = OwnFlow if commit else AtomicFlow
        self.flow = kind(receiver.flow, self.blocking, self.asyncio)

    def _store_on(self, adapter: Adapter, store: Store) -> TransactionStore:
        return store_on(adapter, store)

    @property
    def _run_batch(self) -> Any:  # type: ignore[override]
        return run_own_batch if isinstance(self.flow, OwnFlow) else run_batch

    def on(self, connection: Any, *, commit: bool = False) -> Receiver:
        """Refused: a transaction is in one connection."""
        return self.flow.home.on(connection)

    def close(self, drain: Any = None) -> NoReturn:
        """Refused: who made the connection and the receiver closes them."""
        raise UsageError(
            "receiver.on(connection) holds nothing that could be closed. Close the receiver itself."
        )


class _OtherColour:
    """In place of the colour that a connection does not have."""

    def __init__(self, awaits: bool) -> None:
        self._awaits = awaits

    def __getattr__(self, name: str) -> NoReturn:
        if self._awaits:
            raise ColourMismatch(
                "This connection belongs to an event loop. Use aprocess, async with, or async def."
            )
        raise ColourMismatch(
            "This connection blocks, so an event loop can't use it. Use process, with, or def; or an asyncio driver."
        )


BLOCKING: Any = _OtherColour(False)
AWAITING: Any = _OtherColour(True)


def store_on(adapter: Adapter, store: Store) -> TransactionStore:
    """The records of a store over a user's connection, if that can see them."""
    dialect, form = _form_of(type(store))
    if dialect != adapter.dialect:
        raise UsageError(
            f"The receiver's records are in {type(store).__name__}, and this connection is to {adapter.dialect}. "
            "Both have to be the same database, because only then one transaction can hold record and effect."
        )
    return form(adapter, store)


@lru_cache(maxsize=64)
def _form_of(kind: type[Store]) -> tuple[str, Callable[[Adapter, Any], TransactionStore]]:
    """The dialect of a store, and its form in a transaction."""
    for dialect, (module, name, home, form) in STORES.items():
        loaded = sys.modules.get(f"effectonce.stores.{module}")  # one that is not can't be the receiver's
        if loaded is not None and issubclass(kind, getattr(loaded, name)):
            return dialect, getattr(import_module(f".{home}", __package__), form)
    raise UsageError(
        f"The receiver's records are in a {kind.__name__}, which is no SQL database, so they can't be part of a "
        "transaction. Open the receiver on the database of the connection: sqlite:///, postgresql:// or mysql://."
    )
