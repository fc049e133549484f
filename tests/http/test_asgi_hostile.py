"""What a hostile world does to requests under ASGI: servers that cancel, sends that fail, endless bodies, floods.

On every server where it depends on the server; what several processes and kill -9 do is in ``test_asgi_processes.py``.
"""

from __future__ import annotations

import re
import select
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from tests.http import servers
from tests.http.apps.extremes import BODY_SECONDS, HEADER_BYTES
from tests.http.http2 import Http2Site, Pending
from tests.http.servers import WebServer
from tests.http.site import Site
from tests.http.world import PATIENCE_SECONDS, World

SERVERS = ["hostile-h11", "hostile-httptools", "hostile-hypercorn", "hostile-granian"]


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    """A server with the hostile app inside, and a world of its own."""
    world = World(tmp_path_factory.mktemp(request.param))
    with servers.start(request.param, world) as started:
        yield started
    world.close()


@pytest.fixture
def site(server: WebServer) -> Site:
    return Site(server.url, server.world)


def raw(site: Site, *requests: bytes) -> socket.socket:
    """A connection with requests on it, as they are."""
    connection = socket.create_connection((site.host, site.port), PATIENCE_SECONDS)
    connection.sendall(b"".join(requests))
    return connection


def post(path: str, key: str, body: bytes = b"", *headers: str) -> bytes:
    """A request as it is on the wire, without its length."""
    lines = (f"POST {path}?n={key} HTTP/1.1", "Host: here", f'Idempotency-Key: "{key}"', *headers, "", "")
    return "\r\n".join(lines).encode() + body


def read_all(connection: socket.socket) -> bytes:
    """Everything that comes until the server closes."""
    received = b""
    with connection:
        while piece := connection.recv(65_536):
            received += piece
    return received


# -- Clients and servers that go away ------------------------------------------------------------------------------


def test_a_server_that_cancels_the_request_changes_nothing(site: Site) -> None:
    """The handler runs to its end in a task of its own, and its answer waits for the repeat."""
    key = site.new()
    site.world.hold(key)
    running = site.begin_post("/wait/pay", key, b"5 EUR", ("X-Break", "cancel"))
    site.world.wait_for(key)
    (site.world.folder / f"cancel-{key}").touch()
    assert running.reply().body == b"cancelled"
    site.world.let_go(key)
    reply = site.post("/wait/pay", key, b"5 EUR")
    assert (reply.status, reply.replayed, site.world.count(key)) == (201, True, 1)


def test_a_send_that_fails_after_the_effect_changes_nothing(site: Site) -> None:
    """The answer was recorded before its first byte; the repeat gets it."""
    for what, replayed, code in (("pay", True, None), ("huge", False, "response-not-replayable")):
        key = site.new()
        with raw(site, post(f"/plain/{what}", key, b"", "Content-Length: 0", "X-Break: send")):
            site.world.wait_for(key)
            reply = site.post(f"/wait/{what}", key)  # another path, so that it never waits for itself
        assert reply.code == "key-reused"
        reply = site.post(f"/plain/{what}", key)
        while reply.code == "in-progress":  # the effect has happened, and is being recorded
            reply = site.post(f"/plain/{what}", key)
        assert (reply.replayed, reply.code, site.world.count(key)) == (replayed, code, 1)


def test_a_body_that_is_cut_short_is_no_request(site: Site) -> None:
    """A client that closes its side after half a body, declared or in chunks, has asked nothing."""
    key = site.new()
    for length, body in (("Content-Length: 10", b"5 EUR"), ("Transfer-Encoding: chunked", b"5\r\n5 EUR\r\n")):
        connection = raw(site, post("/plain/pay", key, body, length))
        connection.shutdown(socket.SHUT_WR)
        assert b" 201 " not in read_all(connection)
    assert site.world.count(key) == 0
    assert site.post("/plain/pay", key, b"6 EUR").status == 201


@pytest.mark.parametrize("server", ["hostile-hypercorn", "hostile-granian"], indirect=True)
def test_a_stream_that_http2_resets_changes_nothing(server: WebServer) -> None:
    """RST_STREAM while the handler runs: the connection stays, the handler goes on."""
    site = Http2Site(server.url, server.world)
    key = site.new()
    site.world.hold(key)
    running = site.begin_post("/wait/pay", key)
    assert isinstance(running, Pending)
    site.world.wait_for(key)
    running.reset()
    site.world.let_go(key)
    reply = site.post("/wait/pay", key)
    running.vanish()
    assert (reply.status, reply.replayed, site.world.count(key)) == (201, True, 1)


# -- Requests that are not what they seem --------------------------------------------------------------------------


def test_pipelined_repeats_are_one(site: Site) -> None:
    """Three times the same request in one packet: one effect, three answers in order, the same body."""
    key = site.new()
    last = post("/plain/pay", key, b"5 EUR", "Content-Length: 5", "Connection: close")
    one = post("/plain/pay", key, b"5 EUR", "Content-Length: 5")
    received = read_all(raw(site, one, one, last))
    assert len(re.findall(rb"HTTP/1\.1 201", received)) == 3
    assert len(re.findall(rb"(?i)x-idempotency-replayed: true", received)) == 2
    assert site.world.count(key) == 1


def test_a_body_that_comes_too_slowly_is_refused(site: Site) -> None:
    """Not begun, or begun and not ended: 408 after the time that a body has, and nothing runs."""
    for length, body in (
        ("Content-Length: 10", b""),
        ("Content-Length: 10", b"5 EUR"),
        ("Transfer-Encoding: chunked", b"5\r\n5 EUR\r\n"),
    ):
        key = site.new()
        with raw(site, post("/hasty/pay", key, body, length)) as connection:
            received = connection.recv(65_536)
        assert received.startswith(b"HTTP/1.1 408"), received
        assert site.world.count(key) == 0
        assert site.post("/hasty/pay", key, b"6 EUR").status == 201


def test_a_body_without_an_end_is_refused(site: Site) -> None:
    """Chunk after chunk: 413 as soon as it is too much, however fast it comes."""
    key = site.new()
    connection = raw(site, post("/small/pay", key, b"", "Transfer-Encoding: chunked"))
    connection.setblocking(False)
    chunk, received = b"10000\r\n" + b"x" * 0x10000 + b"\r\n", b""
    while not received:
        readable, writable, _ = select.select([connection], [connection], [], PATIENCE_SECONDS)
        if readable:
            received = connection.recv(65_536)
        elif writable:
            with suppress(BrokenPipeError, ConnectionResetError):  # refused: that is to be read
                connection.send(chunk)
    connection.close()
    assert received.startswith(b"HTTP/1.1 413"), received
    assert site.world.count(key) == 0


def test_an_oversized_key_is_refused(site: Site) -> None:
    """By the boundary, or before it by a server that has limits of its own."""
    name = site.new()
    request = post("/plain/pay", name, b"", "Content-Length: 0", "Connection: close")
    received = read_all(raw(site, request.replace(f'"{name}"'.encode(), b'"' + b"k" * 30_000 + b'"')))
    assert re.match(rb"HTTP/1\.1 4(00|31)", received), received[:200]
    assert site.world.count(name) == 0


def test_oversized_headers_of_an_answer_never_let_it_run_again(site: Site) -> None:
    """They are sent; a repeat gets them again, or hears that it was done."""
    for rules, code in (("plain", None), ("small", "response-not-replayable")):
        key = site.new()
        first, second = site.twice(f"/{rules}/long-headers", key)
        assert (first.status, second.code, site.world.count(key)) == (200, code, 1)
        long = [pair for pair in first.headers if pair[0].startswith("x-long")]
        assert sum(len(value) for _, value in long) == HEADER_BYTES
        assert code or [pair for pair in second.headers if pair[0].startswith("x-long")] == long


# -- Floods --------------------------------------------------------------------------------------------------------


def test_a_caller_has_so_many_new_keys(site: Site) -> None:
    """The next new one is told to wait. Repeats still get their answers, and other callers don't notice."""
    ann, bob = ("X-Caller", site.new("ann")), ("X-Caller", site.new("bob"))
    keys = [site.new() for _ in range(4)]
    statuses = [site.post("/flood/pay", key, b"", ann).status for key in keys]
    assert statuses == [201, 201, 201, 429]
    refused = site.post("/flood/pay", keys[3], b"", ann)
    assert (refused.code, refused.problem["retryable"]) == ("too-many-keys", True)
    assert 0 < int(refused.one("retry-after") or 0) <= 60
    assert site.world.count(keys[3]) == 0
    assert site.post("/flood/pay", keys[0], b"", ann).replayed
    assert site.post("/flood/pay", keys[0], b"else", ann).code == "key-reused"
    assert site.post("/flood/pay", keys[3], b"", bob).status == 201
    assert site.post("/plain/pay", keys[3], b"", ann).status == 201


# -- Secrets -------------------------------------------------------------------------------------------------------


def test_nothing_secret_is_logged_or_told(server: WebServer, site: Site) -> None:
    """Neither bodies, cookies and credentials of a request, nor what it was answered, on any way that it may take."""
    secrets = ["s3cr3t-body", "s3cr3t-cookie", "s3cr3t-answer", "s3cr3t-bearer", "s3cr3t-query"]
    headers = (("Cookie", "id=s3cr3t-cookie"), ("Authorization", "Bearer s3cr3t-bearer"))
    key = site.new()
    replies = [site.post("/plain/secrets", key, b"s3cr3t-body", *headers) for _ in range(2)]
    replies.append(site.post("/plain/secrets", key, b"s3cr3t-body, another", *headers))
    replies.append(site.post("/plain/secrets", site.new(), b"s3cr3t-body raise", *headers))
    replies.append(site.send("POST", "/plain/secrets?n=x&q=s3cr3t-query", headers, b"s3cr3t-body"))
    site.world.break_store("claim")
    try:
        replies.append(site.post("/plain/secrets", site.new(), b"s3cr3t-body", *headers))
    finally:
        site.world.mend_store()
    assert [reply.status for reply in replies] == [200, 200, 422, 500, 400, 503]
    told = b"".join(reply.body for reply in replies[2:]).decode()
    logged = server.log()
    assert "the handler has a bug" in logged and "key=" in logged
    for secret in secrets:
        assert secret not in told
        assert secret not in logged
    assert "Traceback" not in told and "effects.db" not in told


assert BODY_SECONDS < 1  # tests wait for it
