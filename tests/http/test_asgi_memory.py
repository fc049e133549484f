"""What a server process holds while a gigabyte passes through it, either way, and while one is refused."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.http import servers
from tests.http.apps.extremes import PIECE_BYTES
from tests.http.servers import WebServer
from tests.http.site import Site
from tests.http.world import PATIENCE_SECONDS, World

MEBIBYTE = 1 << 20
STREAMED = (1024 if os.environ.get("EFFECTONCE_SOAK") else 128) * MEBIBYTE
MOST_GROWTH = 64 * MEBIBYTE


@pytest.fixture(scope="module", params=["hostile-h11", "hostile-httptools"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    world = World(tmp_path_factory.mktemp(request.param))
    with servers.start(request.param, world) as started:
        yield started
    world.close()


class Growth:
    """How much more memory a process had at its peak than it has now."""

    def __init__(self, server: WebServer) -> None:
        self._folder = Path(f"/proc/{server.pid}")
        (self._folder / "clear_refs").write_text("5")  # forget the peak so far
        self._before = self._read("VmRSS")

    def now(self) -> int:
        return self._read("VmHWM") - self._before

    def _read(self, name: str) -> int:
        lines = (self._folder / "status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def pour(connection: socket.socket, head: str, size: int) -> bytes:
    """Send a request with a body of so many bytes, or of as many as the server takes; the start of its answer."""
    connection.sendall(head.encode())
    piece = memoryview(bytes(PIECE_BYTES))
    while size:
        readable, _, _ = select.select([connection], [connection], [], PATIENCE_SECONDS)
        if readable:
            break
        size -= connection.send(piece[:size])
    return connection.recv(65_536)


def head(path: str, *lines: str) -> str:
    return "\r\n".join((f"POST {path} HTTP/1.1", "Host: here", *lines, "", ""))


def test_what_is_not_covered_streams_through(server: WebServer) -> None:
    """In: the app gets it as it comes. Out: the client gets it as it comes. Nobody holds it."""
    site, growth = Site(server.url, server.world), Growth(server)
    with socket.create_connection((site.host, site.port), PATIENCE_SECONDS) as connection:
        request = head(
            "/uncovered/sink?n=x", "Idempotency-Key: x", f"Content-Length: {STREAMED}", "Connection: close"
        )
        received = pour(connection, request, STREAMED)
        while piece := connection.recv(65_536):
            received += piece
    assert b"%d" % STREAMED in received
    with socket.create_connection((site.host, site.port), PATIENCE_SECONDS) as connection:
        connection.sendall(f"GET /plain/spring?n={STREAMED} HTTP/1.0\r\n\r\n".encode())
        size = 0
        while piece := connection.recv(1 << 20):
            size += len(piece)
    assert size > STREAMED
    assert growth.now() < MOST_GROWTH


@pytest.mark.parametrize("length", [f"Content-Length: {STREAMED}", "Transfer-Encoding: chunked"])
def test_what_is_covered_is_refused_without_being_held(server: WebServer, length: str) -> None:
    """A declared length is refused unread; a body without one as soon as it is too long."""
    site, growth = Site(server.url, server.world), Growth(server)
    key = site.new()
    request = head(f"/plain/sink?n={key}", f"Idempotency-Key: {key}", length)
    if "chunked" in length:
        request += f"{STREAMED:x}\r\n"
    with socket.create_connection((site.host, site.port), PATIENCE_SECONDS) as connection:
        received = pour(connection, request, STREAMED)
    assert received.startswith(b"HTTP/1.1 413")
    assert growth.now() < MOST_GROWTH
    assert site.post("/plain/pay", key).status == 201
