"""Fixtures that several files here share."""

from __future__ import annotations

import pytest
from tests.servers.fixtures import HasURL


@pytest.fixture(params=["dynamodb", "dynamodb_local"])
def endpoint(request: pytest.FixtureRequest) -> str:
    """Each engine of DynamoDB in turn."""
    server: HasURL = request.getfixturevalue(request.param)
    return server.url.partition("endpoint=")[2]


@pytest.fixture
def quick(dynamodb: HasURL) -> str:
    """The engine that is quicker, for what does not depend on it."""
    return dynamodb.url.partition("endpoint=")[2]
