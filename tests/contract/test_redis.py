"""The Redis store keeps the contract: on Valkey, on Redis 7 and on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.contract.circuits import behind_a_circuit
from tests.integration.redis_helpers import clients, forget
from tests.servers.fixtures import HasURL

from effectonce.keys import uuid4
from effectonce.stores import Store
from effectonce.stores.redis import RedisStore
from effectonce.testing.clocks import ManualClock
from effectonce.testing.contract import StoreContract


class RedisContract(StoreContract):
    """Records under a prefix of their own, by the server's clock."""

    lease = 0.1
    keep = 0.2
    purge_delay = 0.01
    url: str
    prefix: str

    def begin(self, server: HasURL) -> Iterator[None]:
        """Let a test use a server, and leave nothing of it there."""
        self.url, self.prefix = server.url, f"{uuid4()}:"
        yield
        forget(self.url, self.prefix)

    def make_store(self, clock: ManualClock) -> Store:
        return RedisStore(self.url, prefix=self.prefix)

    def reopen(self, clock: ManualClock) -> Store:
        return RedisStore(self.url, prefix=self.prefix)

    @contextmanager
    def stall(self) -> Iterator[None]:
        """Keep everyone from writing, as a failover does."""
        with clients(self.url) as servers:
            for server in servers:
                server.client_pause(60_000, all=False)
            yield
            for server in servers:
                server.client_unpause()


class TestValkey(RedisContract):
    """On Valkey."""

    @pytest.fixture(autouse=True)
    def server(self, valkey: HasURL) -> Iterator[None]:
        yield from self.begin(valkey)


class TestRedis7(RedisContract):
    """On Redis, behind a circuit as receivers have it: on an event loop its usual commands go another way there."""

    def make_store(self, clock: ManualClock) -> Store:
        return behind_a_circuit(super().make_store(clock))

    def reopen(self, clock: ManualClock) -> Store:
        return behind_a_circuit(super().reopen(clock))

    @pytest.fixture(autouse=True)
    def server(self, redis7: HasURL) -> Iterator[None]:
        yield from self.begin(redis7)


class TestValkeyCluster(RedisContract):
    """On three servers that share the keys."""

    @pytest.fixture(autouse=True)
    def server(self, valkey_cluster: HasURL) -> Iterator[None]:
        yield from self.begin(valkey_cluster)
