"""The DynamoDB store keeps the contract, on two engines.

The clocks are injected: this process's own wall clock and monotonic clock are what the store goes by. What wrong clocks
do is shown in tests/integration/test_dynamodb.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from uuid import uuid4

import boto3
import pytest
from tests.servers.fixtures import HasURL
from tests.servers.proxy import FaultProxy

from effectonce.stores import Store
from effectonce.stores.dynamodb import DynamoDBStore
from effectonce.testing.clocks import ManualClock
from effectonce.testing.contract import StoreContract
from effectonce.testing.contract._subject import Subject

REGION = "eu-central-1"


@cache
def session() -> Any:
    """One for all tests: what takes longest about a client is reading what DynamoDB can do."""
    return boto3.Session(region_name=REGION)


@cache
def client(endpoint: str) -> Any:
    return session().client("dynamodb", endpoint_url=endpoint)


class DynamoDBContract(StoreContract):
    """A table of its own for each test, without DynamoDB's own deletion: the suite's clock begins in 1970."""

    table: str
    endpoint: str
    proxy: FaultProxy

    def prepare(self, server: HasURL, patch: pytest.MonkeyPatch) -> Iterator[None]:
        shared = session()
        patch.setattr(boto3, "Session", lambda **_: shared)
        self.endpoint = server.url.partition("endpoint=")[2]
        self.table = f"contract-{uuid4().hex}"
        client(self.endpoint).create_table(
            TableName=self.table,
            BillingMode="PAY_PER_REQUEST",
            KeySchema=[{"AttributeName": "k", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "k", "AttributeType": "S"}],
        )
        yield
        client(server.url.partition("endpoint=")[2]).delete_table(TableName=self.table)

    def make_store(self, clock: ManualClock) -> Store:
        return DynamoDBStore(
            self.table,
            region=REGION,
            endpoint=self.endpoint,
            timeout=60.0,
            create=False,
            skew=0.0,
            clock=clock,
            monotonic=clock,
        )

    def reopen(self, clock: ManualClock) -> Store:
        return self.make_store(clock)

    @contextmanager
    def stall(self) -> Iterator[None]:
        """Hold back what the server says, in a proxy that the store has been sent through from the start."""
        self.proxy.stall()
        try:
            yield
        finally:
            self.proxy.heal()

    @pytest.fixture(autouse=True)
    def _proxied(self, request: pytest.FixtureRequest, _prepared: None) -> Iterator[None]:
        """Only for the test that stalls: it takes its time."""
        if "event_loop" not in request.node.name:
            yield
            return
        with FaultProxy(self.endpoint) as self.proxy:
            self.endpoint = self.proxy.url
            yield

    def test_traffic_alone_keeps_the_store_bounded(self, subject: Subject) -> None:
        """DynamoDB deletes by a clock of its own what has the attribute that says when: everything that may go."""
        subject.complete(subject.hold("done"))
        subject.release(subject.hold("released"))
        subject.hold("running")
        subject.hold("at most once", once=True)
        subject.doubt(subject.hold("in doubt"))
        items = client(self.endpoint).scan(TableName=self.table)["Items"]
        assert {item["k"]["S"] for item in items if "t" in item} == {"done", "released", "running"}


class TestMiniStack(DynamoDBContract):
    """A light engine."""

    @pytest.fixture(autouse=True)
    def _prepared(self, dynamodb: HasURL, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        yield from self.prepare(dynamodb, monkeypatch)


@pytest.mark.parametrize("subject", ["blocking"], indirect=True)
class TestDynamoDBLocal(DynamoDBContract):
    """Amazon's own engine, which is slower. Callers on event loops send it nothing else than the others do."""

    test_a_waiting_store_does_not_block_the_event_loop = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def _prepared(self, dynamodb_local: HasURL, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        yield from self.prepare(dynamodb_local, monkeypatch)
