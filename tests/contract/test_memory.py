"""The memory store keeps the contract."""

from __future__ import annotations

from effectonce.stores import Store
from effectonce.stores.memory import WHEEL_SECONDS, MemoryStore
from effectonce.testing.clocks import ManualClock
from effectonce.testing.contract import StoreContract


class TestMemoryStore(StoreContract):
    """Records in this process, by the suite's clock."""

    purge_delay = WHEEL_SECONDS + StoreContract.lease

    def make_store(self, clock: ManualClock) -> Store:
        return MemoryStore(clock=clock)
