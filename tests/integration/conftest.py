"""Fixtures that several files here share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from tests.servers.fixtures import HasURL

if TYPE_CHECKING:
    from tests.integration.test_consumers_kafka import Topic


@pytest.fixture(params=["dynamodb", "dynamodb_local"])
def endpoint(request: pytest.FixtureRequest) -> str:
    """Each engine of DynamoDB in turn."""
    server: HasURL = request.getfixturevalue(request.param)
    return server.url.partition("endpoint=")[2]


@pytest.fixture
def quick(dynamodb: HasURL) -> str:
    """The engine that is quicker, for what does not depend on it."""
    return dynamodb.url.partition("endpoint=")[2]


@pytest.fixture
def topic(kafka: HasURL, request: pytest.FixtureRequest) -> Iterator[Topic]:
    """A topic of the test's own."""
    from tests.integration.test_consumers_kafka import Topic

    topic = Topic(kafka, "".join(each if each.isalnum() else "-" for each in request.node.name))
    yield topic
    topic.close()


@pytest.fixture(scope="module")
def places(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A database of each engine, and of each form of its table, for atomic mode."""
    from tests.integration.transaction_drivers import Place

    made: dict[str, Place] = {}

    def place(dialect: str, options: str = "") -> Place:
        name = dialect + options
        if name not in made:
            if dialect == "sqlite":
                url = f"sqlite:///{tmp_path_factory.mktemp('atomic') / 'app.db'}"
            else:
                url = request.getfixturevalue("postgres" if dialect == "postgresql" else "mariadb").url
            made[name] = Place(dialect, url, options=options)
            made[name].prepare()
        return made[name]

    yield place
    for each in made.values():
        each.remove()
