"""A WSGI server under gunicorn with everything against it: killed processes, crowds that hang up, floods of bytes."""

from __future__ import annotations

import os
import random
import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.http.rules import remembered_part
from tests.http.servers import WebServer, start
from tests.http.site import Reply, Site
from tests.http.world import World

SOAK = bool(os.environ.get("EFFECTONCE_SOAK"))
KEYS = 1000 if SOAK else 60
REPEATS = 5
GROWTH = 64 << 20
PIECE = 1 << 16


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


@pytest.fixture(params=["gunicorn-gthread"])
def server(request: pytest.FixtureRequest, world: World) -> Iterator[WebServer]:
    """A server of the test's own, to do with as it likes."""
    with start(request.param, world) as server:
        yield server


def site_of(server: WebServer) -> Site:
    return Site(server.url, server.world)


@pytest.mark.parametrize(
    ("rules", "status", "code", "effects"), [("lease", 201, None, 2), ("once", 409, "outcome-unknown", 1)]
)
def test_a_server_that_is_killed_between_effect_and_record(
    server: WebServer, rules: str, status: int, code: str | None, effects: int
) -> None:
    """Its claim ends with its lease. Then a repeat runs; or, where a handler starts only once, waits for a person."""
    site = site_of(server)
    key = site.new()
    site.world.hold(key)
    running = site.begin_post(f"/{rules}/pay", key)
    site.world.wait_for(key)
    server.kill()
    site.world.let_go(key)
    running.vanish()
    server.restart()
    reply = site.post(f"/{rules}/pay", key)
    assert (reply.status, reply.code, reply.replayed) == (status, code, False)
    assert site.world.count(key) == effects


def test_a_crowd_of_repeats_that_hang_up_at_random(server: WebServer) -> None:
    """Two processes, one store, five at once for each key: one effect each, and every answer is the same."""
    site = site_of(server)
    chance = random.Random(7)
    keys = [site.new() for _ in range(KEYS)]
    asked = keys * REPEATS
    chance.shuffle(asked)
    leaves = [chance.random() < 0.3 for _ in asked]

    def ask(key: str, leaving: bool) -> tuple[str, Reply | None]:
        running = site.begin_post("/wait/headers", key, b"5 EUR")
        if not leaving:
            return key, running.reply()
        running.vanish()
        return key, None

    with ThreadPoolExecutor(12) as pool:
        answers: dict[str, list[Reply]] = {key: [] for key in keys}
        for key, reply in pool.map(ask, asked, leaves):
            answers[key] += [] if reply is None else [reply]
    for key, replies in answers.items():
        last = site.post("/wait/headers", key, b"5 EUR")
        same = (last.status, last.body, remembered_part(last))
        assert all((reply.status, reply.body, remembered_part(reply)) == same for reply in replies)
        assert sum(not reply.replayed for reply in replies) <= 1
        assert site.world.count(key) == 1


def peak(server: WebServer) -> int:
    """The most memory that any process of a server has ever had."""
    lines = [
        line
        for child in psutil.Process(server.pid).children()
        for line in Path(f"/proc/{child.pid}/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    return max(int(line.split()[1]) for line in lines) << 10


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_an_answer_of_any_size_takes_no_memory(server: WebServer) -> None:
    """It is held up to the cap, and then goes as it comes."""
    site = site_of(server)
    site.post("/plain/pay", site.new())
    before = peak(server)
    pieces = (1 << 30 if SOAK else 1 << 28) // PIECE
    assert site.begin_post("/plain/flood", site.new(), b"%d" % pieces).size() == pieces * PIECE
    assert peak(server) - before < GROWTH


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_body_without_an_end_takes_no_memory(server: WebServer) -> None:
    """It is refused at the cap; until then it is on the disk."""
    site = site_of(server)
    site.post("/plain/pay", site.new())
    before, name = peak(server), site.new()
    chunk = b"%x\r\n%b\r\n" % (PIECE, b"x" * PIECE)
    with socket.create_connection((site.host, site.port), 30) as connection:
        head = f"POST /plain/pay?n={name} HTTP/1.1\r\nHost: h\r\nIdempotency-Key: {name}\r\n"
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        with suppress(ConnectionError):  # it closes, however much is on its way
            while not select.select([connection], [], [], 0)[0]:
                connection.sendall(chunk)
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
    assert peak(server) - before < GROWTH
    assert site.world.count(name) == 0


def test_a_connection_is_as_good_as_new_after_a_refusal(server: WebServer) -> None:
    """A body that nobody wanted to read is not taken for the next request."""
    site = site_of(server)
    name = site.new()
    hidden = f"POST /plain/pay?n={name} HTTP/1.1\r\nHost: h\r\nIdempotency-Key: {name}\r\nContent-Length: 0\r\n\r\n"
    with socket.create_connection((site.host, site.port), 30) as connection:
        head = f"POST /plain/pay?n=x HTTP/1.1\r\nHost: h\r\nContent-Length: {len(hidden)}\r\n\r\n"
        connection.sendall((head + hidden).encode())
        assert connection.recv(12) == b"HTTP/1.1 400"
        connection.sendall(b"GET /plain/200?n=y HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        answers = b"".join(iter(lambda: connection.recv(PIECE), b""))
    assert answers.count(b"HTTP/1.1 200") <= 1
    assert site.world.count(name) == 0
