"""The memory store keeps the contract."""

from __future__ import annotations

from effectonce.stores import Store
from effectonce.stores.memory import MemoryStore
from effectonce.testing.clocks import ManualClock
from effectonce.testing.contract import StoreContract


class TestMemoryStore(StoreContract):
    """Records in this process, by the suite's clock. Nothing else is said: the guide has the suite so, for copying."""

    def make_store(self, clock: ManualClock) -> Store:
        return MemoryStore(clock=clock)
