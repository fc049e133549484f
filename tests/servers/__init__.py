"""Real servers for tests, without Docker: private, on free ports, gone when the test process is.

>>> from tests.servers import start
>>> with start("postgres", max_connections=5) as server:  # doctest: +SKIP
...     server.url
'postgresql://effectonce:secret@127.0.0.1:23042/postgres'

By hand: ``python -m tests.servers up postgres valkey``. In tests: the fixtures of ``fixtures.py``.
"""

from __future__ import annotations

from importlib import import_module

from tests.servers.base import Server, StartError, Unavailable

SERVERS = {
    "valkey": "redis:Valkey",
    "valkey-cluster": "cluster:ValkeyCluster",
    "redis": "redis:Redis",
    "postgres": "postgres:Postgres",
    "mariadb": "mariadb:MariaDB",
    "dynamodb": "dynamodb:MiniStack",
    "dynamodb-local": "dynamodb:DynamoDBLocal",
    "rabbitmq": "rabbitmq:RabbitMQ",
    "nats": "nats:Nats",
    "kafka": "kafka:Kafka",
    "sqs": "sqs:SQS",
}
"""Every kind of server: its name, and where its class is."""


def kind(name: str) -> type[Server]:
    """The class of the servers of this name."""
    if name not in SERVERS:
        raise ValueError(f"no server is called {name!r}; there are {', '.join(SERVERS)}")
    module, _, class_name = SERVERS[name].partition(":")
    found: type[Server] = getattr(import_module(f"tests.servers.{module}"), class_name)
    return found


def variable(name: str) -> str:
    """The environment variable with the URL of a server of this name that runs already, for tests to use instead."""
    return "EFFECTONCE_TEST_" + name.upper().replace("-", "_")


def start(name: str, **settings: object) -> Server:
    """Start a private server, with settings of its own kind, and return when it has answered a request."""
    return kind(name)(**settings).start()


__all__ = ["SERVERS", "Server", "StartError", "Unavailable", "kind", "start", "variable"]
