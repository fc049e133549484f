"""The launcher: each server starts, answers, comes back with its data and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.integration.brokers import BROKERS, Place, published
from tests.servers import (
    SERVERS,
    Server,
    StartError,
    Unavailable,
    fetching,
    fixtures,
    kind,
    ports,
    process,
    start,
)
from tests.servers.base import HOST
from tests.servers.cluster import ValkeyCluster
from tests.servers.dynamodb import DynamoDB
from tests.servers.kafka import Kafka
from tests.servers.mariadb import MariaDB
from tests.servers.nats import Nats
from tests.servers.postgres import DROP_ROOT, Postgres
from tests.servers.rabbitmq import RabbitMQ
from tests.servers.redis import RedisLike
from tests.servers.sqs import SQS

from effectonce.outbox import Event
from effectonce.outbox.publishers import open_publisher
from effectonce.testing.clocks import wait_until

ROOT = Path(__file__).parents[2]
DURABLE = [name for name in SERVERS if name not in ("dynamodb", "sqs")]
"""MiniStack keeps everything in memory."""
SLOW = ["rabbitmq", "kafka"]
"""They take many seconds to start, and are started no more often than needed."""
ONE_PROCESS = [name for name in SERVERS if name not in ("valkey-cluster", *SLOW)]
StartServer = Callable[..., Server]
TOPICS: dict[str, Place] = {}
"""Where ``write`` has left its value."""


# One way to write a value into each server, and to read it back.


def write(server: Server, value: str) -> None:
    match server:
        case RedisLike():
            with server.client() as client:
                client.set("key", value)
        case ValkeyCluster():
            with cluster_client(server) as cluster:
                for slot in range(20):
                    cluster.set(f"key{slot}", value)
        case Postgres() | MariaDB():
            with sql(server) as cursor:
                cursor.execute("CREATE TABLE things (thing VARCHAR(100))")
                cursor.execute("INSERT INTO things VALUES (%s)", [value])
        case DynamoDB():
            table = dynamodb_client(server)
            table.create_table(
                TableName="things",
                AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
                KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
                BillingMode="PAY_PER_REQUEST",
            )
            table.put_item(TableName="things", Item={"id": {"S": "1"}, "thing": {"S": value}})
        case RabbitMQ() | Nats() | Kafka() | SQS():
            place = BROKERS[server.name](server.url)
            TOPICS[server.url] = place
            event = Event(1, "e-1", place.topic, None, value.encode(), {}, 1, 0.0)
            assert list(published(open_publisher(server.url), [event])) == [None]


def read(server: Server) -> str | None:
    match server:
        case RedisLike():
            with server.client() as client:
                return client.get("key")
        case ValkeyCluster():
            with cluster_client(server) as cluster:
                (value,) = {cluster.get(f"key{slot}") for slot in range(20)}
                return value
        case Postgres() | MariaDB():
            with sql(server) as cursor:
                cursor.execute("SELECT thing FROM things")
                return cursor.fetchone()[0]
        case DynamoDB():
            item = dynamodb_client(server).get_item(TableName="things", Key={"id": {"S": "1"}})["Item"]
            return item["thing"]["S"]
        case RabbitMQ() | Nats() | Kafka():
            (payload,) = TOPICS[server.url].payloads()
            return payload.decode()
    raise AssertionError(server)


def cluster_client(server: ValkeyCluster) -> Any:
    import redis

    return redis.RedisCluster(host=HOST, port=server.port, decode_responses=True)


def dynamodb_client(server: DynamoDB) -> Any:
    import boto3

    return boto3.client("dynamodb", region_name="eu-central-1", endpoint_url=f"http://{HOST}:{server.port}")


@contextlib.contextmanager
def sql(server: Postgres | MariaDB) -> Iterator[Any]:
    import psycopg
    import pymysql

    if isinstance(server, Postgres):
        connection: Any = psycopg.connect(server.url)
    else:
        login = {"user": "effectonce", "password": "secret", "database": "effectonce"}
        connection = pymysql.connect(host=HOST, port=server.port, **login)
    with contextlib.closing(connection), connection.cursor() as cursor:
        yield cursor
        connection.commit()


def is_gone(pid: int) -> bool:
    """A zombie is gone too: nobody has looked after it yet, that is all."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def stands_still(pid: int) -> bool:
    return is_gone(pid) or psutil.Process(pid).status() == psutil.STATUS_STOPPED


def folders(server: Server) -> list[Path]:
    return [node.folder for node in server.nodes] if isinstance(server, ValkeyCluster) else [server.folder]


def tree(pid: int) -> list[int]:
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def test_every_server_is_a_fixture_too() -> None:
    """None is forgotten."""
    assert list(fixtures.SHARED.values()) == list(SERVERS)


@pytest.mark.parametrize("fixture", fixtures.SHARED)
def test_fixture_has_the_url_of_a_running_server(request: pytest.FixtureRequest, fixture: str) -> None:
    """The shared servers answer on the port that the URL names."""
    server = request.getfixturevalue(fixture)
    port = re.search(r"127\.0\.0\.1:(\d+)", server.url)[1]
    socket.create_connection((HOST, int(port)), timeout=10).close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SERVERS)
def test_server_lives_from_start_to_stop(start_server: StartServer, name: str) -> None:
    """It answers once it is started; stopped, its process, port and folder are gone, and stopping again is fine.

    Restarted or killed in between, it has the port it had, and the data if it keeps data.
    """
    server = start_server(name)
    write(server, "value")
    url, pid = server.url, server.pid
    server.restart()
    assert is_gone(pid)
    if name in DURABLE:
        assert read(server) == "value"
    pids = tree(server.pid)
    server.kill()
    wait_until(lambda: all(map(is_gone, pids)), what="the end of every process")
    server.restart()
    assert server.url == url
    if name in DURABLE:
        assert read(server) == "value"
    pids = tree(server.pid)
    assert all(folder.is_dir() for folder in folders(server))
    server.stop()
    wait_until(lambda: all(map(is_gone, pids)), what="the end of every process")
    assert not any(folder.exists() for folder in folders(server))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, server.port))
    server.stop()


@pytest.mark.parametrize("name", ["valkey", "postgres", "mariadb"])
def test_paused_server_answers_when_it_is_resumed(start_server: StartServer, name: str) -> None:
    """Every process of it stands still, those of open connections included."""
    server = start_server(name)
    write(server, "value")
    answers: list[str | None] = []
    reader = threading.Thread(target=lambda: answers.append(read(server)))
    server.pause()
    wait_until(lambda: all(map(stands_still, tree(server.pid))), what="the standstill of every process")
    reader.start()
    assert answers == []
    server.resume()
    reader.join(20)
    assert answers == ["value"]


def test_paused_server_can_be_stopped(start_server: StartServer) -> None:
    """What stands still ends as well as what runs."""
    server = start_server("postgres")
    pids = tree(server.pid)
    server.pause()
    began = time.monotonic()
    server.stop()
    assert all(map(is_gone, pids))
    assert time.monotonic() - began < process.STOP_SECONDS


@pytest.mark.parametrize("name", ["valkey", "postgres"])
def test_two_servers_at_once_have_nothing_in_common(start_server: StartServer, name: str) -> None:
    """Each has a port, a folder and data of its own."""
    first, second = start_server(name), start_server(name)
    write(first, "first")
    write(second, "second")
    first.restart()
    assert (read(first), read(second)) == ("first", "second")


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_port_taken_at_the_last_moment_costs_another_attempt(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Somebody binds the port after we have looked and before the server does."""
    free, reservation = ports.reserve_port()  # in vain where there is no such server
    with socket.socket() as thief, socket.socket() as none, reservation:
        thief.bind((HOST, 0))
        taken = thief.getsockname()[1]
        reservations = iter([(taken, none), (free, reservation)])
        monkeypatch.setattr(process, "reserve_port", lambda: next(reservations))
        assert start_server(name).port != taken


def test_reserved_port_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launchers never want the same port, not even while the server on it is down."""
    first, reservation = ports.reserve_port()
    monkeypatch.setattr(ports, "PORTS", range(first, first + 20))
    with reservation:
        for _ in range(100):
            port, other = ports.reserve_port()
            other.close()
            assert port != first


@pytest.mark.parametrize(
    ("name", "settings", "complaint"),
    [
        ("redis", {"maxmemory": "much"}, "maxmemory much"),
        ("postgres", {"max_connections": "many"}, 'invalid value for parameter "max_connections": "many"'),
        ("mariadb", {"no_such_setting": 1}, "no_such_setting"),
    ],
)
def test_start_that_fails_shows_the_log(name: str, settings: dict[str, object], complaint: str) -> None:
    """The reason is in the message; nothing is left behind."""
    kind(name).get()
    server = kind(name)(**settings)
    with pytest.raises(StartError, match=complaint):
        server.start()
    assert not any(folder.exists() for folder in folders(server))


def test_settings_are_the_servers_own(start_server: StartServer) -> None:
    """Names are those of its configuration, with underscores."""
    redis = start_server("redis", maxmemory="10mb", maxmemory_policy="allkeys-lru", requirepass="secret")
    assert redis.url == f"redis://:secret@127.0.0.1:{redis.port}/0"
    with redis.client() as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}
    with sql(start_server("postgres", max_connections=7)) as cursor:
        assert cursor.execute("SHOW max_connections").fetchone() == ("7",)
    with sql(start_server("mariadb", max_connections=17)) as cursor:
        cursor.execute("SELECT @@max_connections")
        assert cursor.fetchone() == (17,)


@pytest.mark.parametrize("name", ["valkey", "redis"])
def test_replica_is_ready_when_it_has_what_its_primary_had(start_server: StartServer, name: str) -> None:
    """No waiting is left to the test."""
    primary = start_server(name)
    write(primary, "value")
    replica = start_server(name, replicaof=f"127.0.0.1 {primary.port}")
    assert read(replica) == "value"


def test_durability_is_on_by_default(start_server: StartServer) -> None:
    """What tests show of commits holds in production."""
    with sql(start_server("postgres")) as cursor:
        assert cursor.execute("SHOW fsync").fetchone() == ("on",)
    with sql(start_server("mariadb")) as cursor:
        cursor.execute("SELECT @@innodb_flush_log_at_trx_commit")
        assert cursor.fetchone() == (1,)


@pytest.mark.skipif(os.geteuid() != 0, reason="PostgreSQL runs as who we are unless that is root")
def test_postgres_runs_from_a_closed_folder(tmp_path: Path) -> None:
    """As root in a checkout that nobody else may enter, though it is nobody who runs it."""
    program = tmp_path / "closed" / "program"
    program.parent.mkdir(mode=0o700)
    program.write_text("#!/bin/sh\nid -un\n")
    program.chmod(0o700)
    run = subprocess.run(
        [*DROP_ROOT, "sh", "-c", f"test -x {program} && {program}"], capture_output=True, text=True
    )
    assert (run.stdout, run.stderr) == ("nobody\n", "")


# What happens when the process that started servers can't end them.

VICTIM = """
import sys, time
from tests.servers import start
servers = [start(name) for name in sys.argv[1:]]
for server in servers:
    print(server.pid, server.folder, flush=True)
print(flush=True)
time.sleep(1000)
"""
DIES_EARLY = """
import os, signal
from tests.servers import start, watcher
watch = watcher.watch
def die(thing):
    if isinstance(thing, int):
        print(thing, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    print(thing, flush=True)
    watch(thing)
watcher.watch = die
start("valkey")
"""


def run_python(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_nothing_is_left_when_the_test_process_is_killed() -> None:
    """SIGKILL for the process that started them ends the servers, their children and their folders."""
    with run_python("-c", VICTIM, "valkey", "postgres", "dynamodb") as victim:
        assert victim.stdout is not None
        started = [line.split() for line in iter(victim.stdout.readline, "\n")]
        pids = [each for pid, _ in started for each in tree(int(pid))]
        assert len(pids) > len(started) == 3
        victim.kill()
    wait_until(lambda: all(map(is_gone, pids)), what="the end of every process")
    wait_until(
        lambda: not any(Path(folder).exists() for _, folder in started), what="the end of every folder"
    )


def test_no_moment_to_be_orphaned_in() -> None:
    """Killed after the process is there and before anyone knows of it: the server never begins to run."""
    with run_python("-c", DIES_EARLY) as victim:
        folder, pid = victim.communicate()[0].split()
    assert victim.returncode == -signal.SIGKILL
    wait_until(lambda: is_gone(int(pid)), what="the end of the process")
    wait_until(lambda: not Path(folder).exists(), what="the end of the folder")


def test_by_hand() -> None:
    """``python -m tests.servers up`` prints URLs, waits for Ctrl-C and ends what it started."""
    with run_python("-m", "tests.servers", "up", "valkey", "dynamodb") as command:
        assert command.stdout is not None
        lines = list(iter(command.stdout.readline, "Ctrl-C ends them.\n"))
        url = lines[0].split()[1]
        assert url.startswith("valkey://")
        assert f"  export EFFECTONCE_TEST_VALKEY='{url}'\n" in lines
        assert "  export AWS_ACCESS_KEY_ID='test'\n" in lines
        command.send_signal(signal.SIGINT)
    assert command.returncode == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, int(url.rpartition(":")[2].removesuffix("/0"))))


def test_list_names_every_server() -> None:
    """``python -m tests.servers list``."""
    with run_python("-m", "tests.servers", "list") as command:
        output = command.communicate()[0]
    assert [line.split()[0] for line in output.splitlines()] == list(SERVERS)


def test_unknown_server_is_an_error_that_names_the_others() -> None:
    """A typing error is found at once."""
    with pytest.raises(ValueError, match="no server is called 'oracle'; there are valkey, "):
        start("oracle")


# Fixtures and downloads.


def test_running_server_is_used_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment variable of a server is its URL, and nothing is started."""
    monkeypatch.setenv("EFFECTONCE_TEST_DYNAMODB_LOCAL", "dynamodb://mine")
    monkeypatch.setattr(fixtures, "start", None)
    (server,) = fixtures._shared("dynamodb-local")(None)
    assert server.url == "dynamodb://mine"


def test_server_that_cannot_be_had_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its name and the reason, by the fixture that makes a loud skip or a failure of it."""

    class Reported(Exception):
        pass

    def report(server: str, reason: str) -> None:
        raise Reported(server, reason)

    def missing(name: str) -> None:
        raise Unavailable("no shop sells it")

    monkeypatch.setattr(fixtures, "start", missing)
    with pytest.raises(Reported) as reported:
        next(fixtures._shared("valkey")(report))
    assert reported.value.args == ("valkey", "no shop sells it")


def test_download_is_made_once_by_two_runs_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Who comes second waits and finds it."""
    monkeypatch.setattr(fetching, "CACHE", tmp_path / "cache")
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "program").touch()

    threads = [threading.Thread(target=fetching.cached, args=("thing", make)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert (fetching.cached("thing", make) / "program").exists()


def test_download_that_fails_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message ends with what the command said; the next run tries again."""
    monkeypatch.setattr(fetching, "CACHE", tmp_path)

    def make(folder: Path) -> None:
        (folder / "half").touch()
        fetching.run("getting the thing", "sh", "-c", "echo no network; exit 3")

    for _ in range(2):
        with pytest.raises(Unavailable, match="exit status 3:\nno network"):
            fetching.cached("thing", make)


def test_program_that_is_not_there_is_unavailable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not a crash but a reason."""
    monkeypatch.setattr(fetching, "CACHE", tmp_path)
    with pytest.raises(Unavailable, match="No such file"):
        fetching.run("getting the thing", os.fspath(tmp_path / "mvn"))
    with pytest.raises(Unavailable, match="the Python package no-such-wheel isn't installed"):
        fetching.wheel("no-such-wheel")
