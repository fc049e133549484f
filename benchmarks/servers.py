"""The servers that cases run on: started privately when the first case asks, or those of EFFECTONCE_TEST_… .

Each row of a case gets a room of its own on its case's server: a database, or a table. So every contender is used with
nothing but a URL, as its users do, and finds nobody else's keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from importlib.metadata import version
from typing import Self
from urllib.parse import parse_qs, urlsplit

from tests.servers import start, variable

# What the server's own defaults would let happen to one contender's slice and not to another's.
SETTINGS: dict[str, dict[str, object]] = {
    # Neither a log nor a snapshot: what is measured is the way to the server, not its disk.
    "valkey": {"appendonly": "no"},
    "redis": {"appendonly": "no"},
    # No checkpoint in the middle of a case, nor whole pages logged after one; and memory for millions of keys.
    "postgres": {"max_wal_size": "16GB", "checkpoint_timeout": "1h", "shared_buffers": "2GB"},
    "mariadb": {"innodb_log_file_size": "1G", "innodb_buffer_pool_size": "2G"},
}


Room = tuple[str, str]
"""Its URL, and the version of the server it is on."""


class NoServer(Exception):
    """A server that can't be had; the message says why."""


class Servers:
    """Starts each server once and ends all of them when the run ends."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._urls: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        self._rooms = 0
        self.versions: dict[str, str] = {}
        """Of the servers that were used."""

    @contextmanager
    def room(self, server: str, *, is_timed: bool) -> Iterator[str]:
        """The URL of an empty place on that server, which is cleared afterwards. Where no time is taken, a commit
        need not wait for the disk. Of two servers, named with a +, both URLs, with a space between.
        """
        if "+" in server:
            with ExitStack() as stack:
                each = [stack.enter_context(self.room(one, is_timed=is_timed)) for one in server.split("+")]
                yield " ".join(each)
            return
        self._rooms += 1
        room = ROOMS[server](self._url(server), self._rooms, is_timed)
        try:
            url, self.versions[server] = room.__enter__()
        except Exception as error:  # each driver has errors of its own
            raise NoServer(_shown(error)) from error
        try:
            yield url
        finally:
            with suppress(Exception):
                room.__exit__(None, None, None)

    def _url(self, server: str) -> str:
        if server in self._reasons:
            raise NoServer(self._reasons[server])
        if server not in self._urls:
            try:
                self._urls[server] = os.environ.get(variable(server)) or self._start(server)
            except Exception as error:  # it can't be had, does not start, or its driver is missing
                self._reasons[server] = f"no {server}: {_shown(error)}"
                raise NoServer(self._reasons[server]) from error
        return self._urls[server]

    def _start(self, server: str) -> str:
        started = self._stack.enter_context(start(server, **SETTINGS.get(server, {})))
        for name, value in started.client_environment.items():
            os.environ.setdefault(name, value)
        return started.url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _shown(error: Exception) -> str:
    return str(error).partition("\n")[0]


@contextmanager
def _redis_database(url: str, number: int, is_timed: bool) -> Iterator[Room]:
    """One of the numbered databases. Another program's keys are never flushed."""
    import redis

    place = urlsplit(url)._replace(scheme="redis", path=f"/{number % 15 + 1}").geturl()
    with redis.Redis.from_url(place) as client:
        if client.dbsize():
            raise NoServer(f"database {number % 15 + 1} of the given server is not empty")
        about = client.info("server")
        try:
            yield place, about.get("valkey_version") or about["redis_version"]
        finally:
            client.flushdb()


@contextmanager
def _postgres_database(url: str, number: int, is_timed: bool) -> Iterator[Room]:
    import psycopg

    name = f"bench_{os.getpid()}_{number}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        if not is_timed:
            connection.execute(f"ALTER DATABASE {name} SET synchronous_commit = off".encode())
        try:
            yield urlsplit(url)._replace(path=f"/{name}").geturl(), str(connection.info.server_version)
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@contextmanager
def _mysql_database(url: str, number: int, is_timed: bool) -> Iterator[Room]:
    import pymysql

    place, name = urlsplit(url), f"bench_{os.getpid()}_{number}"
    connection = pymysql.connect(
        host=place.hostname, port=place.port or 3306, user=place.username, password=place.password or ""
    )
    with connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name}")
        try:
            yield place._replace(path=f"/{name}").geturl(), connection.get_server_info()
        finally:
            cursor.execute(f"DROP DATABASE {name}")


@contextmanager
def _dynamodb_table(url: str, number: int, is_timed: bool) -> Iterator[Room]:
    """A name for a table. Each contender makes its own, since each has another key."""
    import boto3

    place, name = urlsplit(url), f"bench-{os.getpid()}-{number}"
    options = {key: values[0] for key, values in parse_qs(place.query).items()}
    client = boto3.client("dynamodb", region_name=options.get("region"), endpoint_url=options.get("endpoint"))
    try:
        yield place._replace(netloc=name).geturl(), f"ministack {version('ministack')}"
    finally:
        if name in client.list_tables()["TableNames"]:
            client.delete_table(TableName=name)


@contextmanager
def _broker(url: str, number: int, is_timed: bool) -> Iterator[Room]:
    """All of it: each contender names a topic of its own."""
    yield url, ""


ROOMS: dict[str, Callable[[str, int, bool], AbstractContextManager[Room]]] = {
    "valkey": _redis_database,
    "redis": _redis_database,
    "postgres": _postgres_database,
    "mariadb": _mysql_database,
    "dynamodb": _dynamodb_table,
    "nats": _broker,
    "rabbitmq": _broker,
    "kafka": _broker,
    "sqs": _broker,
}
