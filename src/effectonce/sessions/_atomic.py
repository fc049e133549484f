"""Sessions inside a user's transaction: the session's mark, the request's answer and its effects commit together.

The session's row is locked from the claim to the user's commit, so that the requests of one client run one after the
other here; those of different clients run side by side.
"""

from __future__ import annotations

from typing import Any, cast

from .._receiver import Receiver
from .._records import Claim, Completion, Decision, Ending, Record
from ..errors import UsageError
from ..stores import Store
from ..transactions._receiver import OnConnection
from ..transactions._stores import TransactionStore
from ..transactions.base import Adapter
from ._sql import SqlDesk
from ._store import DeskStore


class SessionsOnConnection(OnConnection):
    """A receiver over the sessions that one connection sees."""

    def _store_on(self, adapter: Adapter, store: Store) -> TransactionStore:
        return AtomicSessions(adapter, store)


class AtomicSessions(TransactionStore, DeskStore):
    """The shared verbs at a desk over the user's connection."""

    def __init__(self, adapter: Adapter, store: Any) -> None:
        super().__init__(adapter)
        tables = getattr(store, "tables", None)
        if tables is None or tables.dialect != adapter.dialect:
            kind = type(store).__name__
            raise UsageError(
                f"The receiver's sessions are in {kind}, and this connection is to {adapter.dialect}. Both have to be "
                "the same SQL database, because only then one transaction can hold session and effect."
            )
        self._desk = SqlDesk(adapter, tables)

    async def at_desk(self, work: Any) -> Any:
        with self.errors:
            return await work(self._desk)

    async def now(self) -> float:
        """The engine's clock."""
        return await self._desk.now()

    async def claim(self, claim: Claim) -> Decision:
        """Decide one request, after the transactions that have its session."""
        return await DeskStore.claim(self, claim)

    async def complete(self, completion: Completion) -> Ending:
        """End a request."""
        return await DeskStore.complete(self, completion)

    async def get(self, key: str) -> Record | None:
        """Read a request."""
        return await DeskStore.get(self, key)


def inside(receiver: Receiver, connection: Any) -> Receiver:
    """The receiver for one transaction."""
    return cast("Receiver", SessionsOnConnection(receiver, connection))
