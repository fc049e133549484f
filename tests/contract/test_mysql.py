"""The MySQL store keeps the contract on a real MariaDB, also in the words that MySQL understands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import pytest
from tests.integration.mysql_helpers import Session
from tests.servers.fixtures import HasURL

from effectonce._blocking import run
from effectonce.stores import Store, open_store
from effectonce.stores._mysql_sql import Language, Server, Talk
from effectonce.stores.mysql import MySQLStore
from effectonce.testing.clocks import ManualClock
from effectonce.testing.contract import StoreContract
from effectonce.testing.contract._batches import BatchForms
from effectonce.testing.contract._claims import ClaimRules
from effectonce.testing.contract._crowds import Crowds
from effectonce.testing.contract._suite import Suite


@pytest.fixture(scope="class")
def table(mariadb: HasURL) -> Iterator[str]:
    """A table of its own for each class; making one for each test would take longer than the tests."""
    name = f"contract_{uuid4().hex}"
    with MySQLStore.from_url(mariadb.url, {"table": name}) as store:
        run(store.migrate())
    yield name
    with Session(mariadb.url) as session:
        session(f"DROP TABLE {name}")


class OnMariaDB(Suite):
    """An empty table for each test; time is the server's."""

    lease = 0.15
    keep = 0.3
    url: str
    table: str

    @pytest.fixture(autouse=True)
    def empty_table(self, mariadb: HasURL, table: str) -> None:
        self.url, self.table = mariadb.url, table
        with Session(self.url) as session:
            session(f"DELETE FROM {self.table}")

    def make_store(self, clock: ManualClock) -> Store:
        return open_store(f"{self.url}?table={self.table}")

    def reopen(self, clock: ManualClock) -> Store:
        return self.make_store(clock)

    @contextmanager
    def stall(self) -> Iterator[None]:
        """Hold the table, as another session may."""
        with Session(self.url) as session:
            session(f"LOCK TABLES {self.table} WRITE")
            yield


class TestMySQLStore(OnMariaDB, StoreContract):
    """The whole of it, in MariaDB's words."""


class TestMySQLWords(OnMariaDB, ClaimRules, BatchForms, Crowds):
    """Where MySQL is spoken to in other words: its INSERT can't say what is there."""

    @pytest.fixture(autouse=True)
    def no_returning(self, monkeypatch: pytest.MonkeyPatch) -> None:
        greet = Language.greet

        def greet_mysql(language: Language, durable: bool) -> Talk[Server]:
            server = yield from greet(language, durable)
            return server._replace(is_mariadb=False)

        monkeypatch.setattr(Language, "greet", greet_mysql)
