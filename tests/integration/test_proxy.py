"""The fault proxy loses exactly what it is told to lose. An echo server that counts tells what arrived."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Iterator

import pytest
from tests.servers.base import HOST
from tests.servers.fixtures import HasURL
from tests.servers.proxy import FaultProxy

from effectonce.testing.clocks import wait_until

SILENCE_SECONDS = 0.05
"""How long to listen for what must not come."""


class Echo(socketserver.ThreadingTCPServer):
    """Answers each line with itself, and remembers what it has seen."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((HOST, 0), EchoHandler)
        self.seen: list[bytes] = []

    @property
    def url(self) -> str:
        return f"echo://user:12345@{HOST}:{self.server_address[1]}/0"


class EchoHandler(socketserver.StreamRequestHandler):
    server: Echo

    def handle(self) -> None:
        for line in self.rfile:
            self.server.seen.append(line)
            self.wfile.write(line)


class Client:
    """A client that sends lines and reads the answers."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection((HOST, port), timeout=10)
        self.answers = self.socket.makefile("rb")

    def send(self, line: bytes) -> None:
        self.socket.sendall(line)

    def ask(self, line: bytes) -> bytes:
        """The answer; an empty one, or ConnectionError, when the connection was cut."""
        self.send(line)
        return self.answers.readline()

    def is_cut_by(self, line: bytes) -> bool:
        try:
            return self.ask(line) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self.answers.close()
        self.socket.close()


Connect = Callable[[], Client]


@pytest.fixture
def echo() -> Iterator[Echo]:
    with Echo() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[FaultProxy]:
    with FaultProxy(echo.url) as proxy:
        yield proxy


@pytest.fixture
def connect(proxy: FaultProxy) -> Iterator[Connect]:
    """Connections to the proxy, closed after the test."""
    clients: list[Client] = []

    def connect() -> Client:
        clients.append(Client(proxy.port))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:{port}/0"),
        ("valkey://:1234@127.0.0.1:6379/0", "valkey://:1234@127.0.0.1:{port}/0"),
        ("postgresql://u:12@localhost:5432/db?a=b", "postgresql://u:12@127.0.0.1:{port}/db?a=b"),
        (
            "dynamodb://t?region=eu-central-1&endpoint=http://127.0.0.1:8000",
            "dynamodb://t?region=eu-central-1&endpoint=http://127.0.0.1:{port}",
        ),
    ],
)
def test_url_is_the_servers_with_another_port(url: str, expected: str) -> None:
    """User, password, database and options stay as they are."""
    with FaultProxy(url) as proxy:
        assert proxy.url == expected.format(port=proxy.port)


def test_url_without_a_port_is_an_error() -> None:
    """A proxy in front of nothing is refused at once."""
    with pytest.raises(ValueError, match="names no host and port"):
        FaultProxy("memory://")


def test_passes_on_what_both_sides_say(proxy: FaultProxy, connect: Connect) -> None:
    """Without a fault nobody sees that it is there, however much is said."""
    client = connect()
    line = b"x" * 1_000_000 + b"\n"
    assert client.ask(b"hello\n") == b"hello\n"
    assert client.ask(line) == line
    assert proxy.connections == 1


def test_counts_round_trips(proxy: FaultProxy, connect: Connect) -> None:
    """A burst is one round trip, however many requests are in it; each connection has its own."""
    first, second = connect(), connect()
    first.ask(b"a\n")
    assert proxy.bursts == 1
    first.ask(b"b\n")
    second.ask(b"c\n")
    assert proxy.bursts == 3
    first.send(b"d\ne\n")
    assert [first.answers.readline(), first.answers.readline()] == [b"d\n", b"e\n"]
    assert proxy.bursts == 4
    assert proxy.connections == 2


def test_lost_request_never_reaches_the_server(proxy: FaultProxy, echo: Echo, connect: Connect) -> None:
    """The connection is cut, and the next one works: the fault happens once."""
    client = connect()
    proxy.lose_request()
    assert client.is_cut_by(b"lost\n")
    assert connect().ask(b"next\n") == b"next\n"
    assert echo.seen == [b"next\n"]
    assert proxy.fired == 1


def test_lost_reply_is_to_a_request_that_was_carried_out(
    proxy: FaultProxy, echo: Echo, connect: Connect
) -> None:
    """The server has seen it; the client can't tell it from a lost request."""
    client = connect()
    proxy.lose_reply()
    assert client.is_cut_by(b"done\n")
    assert echo.seen == [b"done\n"]
    assert connect().ask(b"next\n") == b"next\n"
    assert proxy.fired == 1


@pytest.mark.parametrize("lose", ["lose_request", "lose_reply"])
def test_fault_waits_for_its_burst(proxy: FaultProxy, connect: Connect, lose: str) -> None:
    """The nth burst from now, over all connections; until then ``fired`` says that it has not happened."""
    first, second = connect(), connect()
    first.ask(b"before\n")
    getattr(proxy, lose)(3)
    assert first.ask(b"1\n") == b"1\n"
    assert second.ask(b"2\n") == b"2\n"
    assert proxy.fired == 0
    assert first.is_cut_by(b"3\n")
    assert second.ask(b"4\n") == b"4\n"


def test_other_connections_outlive_a_loss(proxy: FaultProxy, connect: Connect) -> None:
    """Only the connection of the lost burst is cut."""
    first, second = connect(), connect()
    second.ask(b"a\n")
    proxy.lose_request()
    assert first.is_cut_by(b"lost\n")
    assert second.ask(b"b\n") == b"b\n"


def test_cut_ends_every_connection(proxy: FaultProxy, connect: Connect) -> None:
    """Those that are there are gone; new ones are welcome."""
    clients = [connect(), connect()]
    for client in clients:
        client.ask(b"a\n")
    proxy.cut()
    assert all(client.is_cut_by(b"b\n") for client in clients)
    assert connect().ask(b"c\n") == b"c\n"


def test_stall_holds_everything_back_until_healed(proxy: FaultProxy, echo: Echo, connect: Connect) -> None:
    """Old and new connections are silent alike; healed, they deliver what was held back."""
    old = connect()
    old.ask(b"before\n")
    proxy.stall()
    new = connect()
    for client in (old, new):
        client.send(b"late\n")
        client.socket.settimeout(SILENCE_SECONDS)
        with pytest.raises(TimeoutError):
            client.socket.recv(1)
        client.socket.settimeout(10)
    assert echo.seen == [b"before\n"]
    proxy.heal()
    assert [client.socket.recv(100) for client in (old, new)] == [b"late\n", b"late\n"]


def test_cut_drops_what_was_held_back(proxy: FaultProxy, echo: Echo, connect: Connect) -> None:
    """A stall that ends in a cut is a request that never arrived."""
    client = connect()
    client.ask(b"before\n")
    proxy.stall()
    client.send(b"late\n")
    wait_until(lambda: proxy.bursts == 2)
    proxy.cut()
    proxy.heal()
    assert connect().ask(b"after\n") == b"after\n"
    assert echo.seen == [b"before\n", b"after\n"]


def test_refuses_new_connections_until_healed(proxy: FaultProxy, connect: Connect) -> None:
    """As if nobody listened; who is connected already goes on."""
    old = connect()
    old.ask(b"a\n")
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        connect()
    assert old.ask(b"b\n") == b"b\n"
    proxy.heal()
    assert connect().ask(b"c\n") == b"c\n"


def test_heal_calls_off_a_planned_fault(proxy: FaultProxy, connect: Connect) -> None:
    """What has not happened doesn't happen."""
    client = connect()
    proxy.lose_request()
    proxy.heal()
    assert client.ask(b"a\n") == b"a\n"
    assert proxy.fired == 0


def test_server_that_is_gone_is_a_cut_connection(proxy: FaultProxy, echo: Echo, connect: Connect) -> None:
    """The proxy can't answer for it."""
    echo.socket.close()
    assert connect().is_cut_by(b"a\n")


def test_end_of_one_side_reaches_the_other(proxy: FaultProxy, connect: Connect) -> None:
    """A client that leaves leaves no connection behind at the server."""
    client = connect()
    client.ask(b"a\n")
    client.close()
    wait_until(lambda: not proxy._links)


# With real servers and their drivers.


def test_lost_requests_and_replies_of_valkey(valkey: HasURL) -> None:
    """The counter tells what the server did; the client only knows that the connection broke."""
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    once = Retry(NoBackoff(), retries=0)
    with FaultProxy(valkey.url) as proxy:
        client = redis.Redis.from_url(
            proxy.url.replace("valkey://", "redis://"), retry=once, socket_timeout=10
        )
        with client:
            assert client.incr("proxied") == 1
            bursts = proxy.bursts
            assert client.incr("proxied") == 2
            assert proxy.bursts == bursts + 1
            proxy.lose_request()
            with pytest.raises(redis.ConnectionError):
                client.incr("proxied")
            assert client.get("proxied") == b"2"
            proxy.lose_reply()
            with pytest.raises(redis.ConnectionError):
                client.incr("proxied")
            assert client.get("proxied") == b"3"
            client.delete("proxied")


def test_lost_commit_of_postgres(postgres: HasURL) -> None:
    """A lost COMMIT is rolled back; a COMMIT whose answer is lost is not. Both look alike."""
    import psycopg

    def rows() -> int:
        with psycopg.connect(postgres.url) as connection:
            return connection.execute("SELECT count(*) FROM proxied").fetchone()[0]

    def commit_with(fault: Callable[[], None]) -> None:
        with psycopg.connect(proxy.url) as connection:
            connection.execute("INSERT INTO proxied DEFAULT VALUES")
            fault()
            with pytest.raises(psycopg.OperationalError):
                connection.commit()

    with psycopg.connect(postgres.url, autocommit=True) as connection, FaultProxy(postgres.url) as proxy:
        connection.execute("CREATE TABLE proxied (id serial)")
        commit_with(proxy.lose_request)
        assert rows() == 0
        commit_with(proxy.lose_reply)
        assert rows() == 1
        connection.execute("DROP TABLE proxied")
