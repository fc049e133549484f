"""Fixtures for tests that need a server.

``valkey``, ``valkey_cluster``, ``redis7``, ``postgres``, ``mariadb``, ``dynamodb``, ``dynamodb_local``, ``rabbitmq``,
``nats``, ``kafka`` and ``sqs`` are started when the first test asks and shared by all tests of the run: use keys,
tables or topics of your own, and don't stop them. To stop, kill, pause or configure a server, have one of your own with
``start_server``.

``EFFECTONCE_TEST_POSTGRES=postgresql://…`` uses a server that runs already, likewise for the other names of servers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import NoReturn, Protocol

import pytest
from tests.servers import Server, Unavailable, kind, start, variable

SHARED = {
    "valkey": "valkey",
    "valkey_cluster": "valkey-cluster",
    "redis7": "redis",
    "postgres": "postgres",
    "mariadb": "mariadb",
    "dynamodb": "dynamodb",
    "dynamodb_local": "dynamodb-local",
    "rabbitmq": "rabbitmq",
    "nats": "nats",
    "kafka": "kafka",
    "sqs": "sqs",
}
"""The fixtures and the servers they start."""

_unavailable: dict[str, Unavailable] = {}


class HasURL(Protocol):
    """What a test may rely on in a shared server."""

    @property
    def url(self) -> str: ...


@dataclass(frozen=True)
class RunningServer:
    """A server that somebody else started and will end."""

    url: str


def pytest_collection_finish(session: pytest.Session) -> None:
    """Get what the chosen tests need before the first of them, with no time-out running and progress to be seen."""
    if session.config.option.collectonly:
        return
    used = {fixture for item in session.items for fixture in getattr(item, "fixturenames", ())}
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else nullcontext():
        for fixture, server in SHARED.items():
            if {fixture, "start_server"} & used and variable(server) not in os.environ:
                _get(server)


def _get(server: str) -> None:
    try:
        kind(server).get()
    except Unavailable as reason:
        _unavailable[server] = reason


def _start(server: str, unavailable: Callable[[str, str], NoReturn], **settings: object) -> Server:
    if reason := _unavailable.get(server):
        unavailable(server, str(reason))
    try:
        return start(server, **settings)
    except Unavailable as reason:
        unavailable(server, str(reason))


def _set_client_environment(server: Server, patch: pytest.MonkeyPatch) -> None:
    for name, value in server.client_environment.items():
        patch.setenv(name, os.environ.get(name, value))


def _shared(server: str, **settings: object) -> Callable[..., Iterator[HasURL]]:
    def fixture(server_unavailable: Callable[[str, str], NoReturn]) -> Iterator[HasURL]:
        if url := os.environ.get(variable(server)):
            yield RunningServer(url)
            return
        with pytest.MonkeyPatch.context() as patch, _start(server, server_unavailable, **settings) as started:
            _set_client_environment(started, patch)
            yield started

    return fixture


valkey = pytest.fixture(_shared("valkey"), scope="session")
valkey_cluster = pytest.fixture(_shared("valkey-cluster"), scope="session")
redis7 = pytest.fixture(_shared("redis"), scope="session")
postgres = pytest.fixture(_shared("postgres"), scope="session")
mariadb = pytest.fixture(_shared("mariadb"), scope="session")
dynamodb = pytest.fixture(_shared("dynamodb"), scope="session")
dynamodb_local = pytest.fixture(_shared("dynamodb-local", in_memory=True), scope="session")
rabbitmq = pytest.fixture(_shared("rabbitmq"), scope="session")
nats = pytest.fixture(_shared("nats"), scope="session")
kafka = pytest.fixture(_shared("kafka"), scope="session")
sqs = pytest.fixture(_shared("sqs"), scope="session")


@pytest.fixture
def start_server(
    server_unavailable: Callable[[str, str], NoReturn], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Server]]:
    """``start_server("redis", maxmemory="10mb")``: a server of this test's own, ended after it."""

    def start_one(name: str, **settings: object) -> Server:
        server = stack.enter_context(_start(name, server_unavailable, **settings))
        _set_client_environment(server, monkeypatch)
        return server

    with ExitStack() as stack:
        yield start_one
