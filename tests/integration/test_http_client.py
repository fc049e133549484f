"""The client on real sockets, against a server that misbehaves: each effect happens once, and its answer arrives."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from email.utils import formatdate
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import requests
import urllib3
import uvicorn

from effectonce import Receiver
from effectonce.http import PUBLIC
from effectonce.http.client import (
    AsyncIdempotencyTransport,
    Delivery,
    IdempotencyAdapter,
    IdempotencyTransport,
    Journal,
    Rules,
    delivery,
    named,
)
from effectonce.testing.clocks import wait_until

ROOT = Path(__file__).parents[2]
QUICK = Rules(backoff="2ms", longest="10ms", poll="10ms", budget="20s")
Step = Callable[["Handler"], None]


# The server


class Server(ThreadingHTTPServer):
    """Keeps its books: what happened, under which key. It follows its script, and then behaves."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.script: list[Step] = []
        self.effects: list[bytes] = []
        self.answers: dict[str, bytes] = {}
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.drips = 0
        self.hung, self.released = threading.Event(), threading.Event()
        self.books = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are what these tests are about."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    body: bytes

    def do_POST(self) -> None:
        server = self.server
        self.body = self.read_body()
        with server.books:
            server.keys.append(self.headers.get("Idempotency-Key"))
            server.paths.append(self.path)
            step = server.script.pop(0) if server.script else behave
        step(self)

    do_PATCH = do_GET = do_PUT = do_POST

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces: list[bytes] = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def effect(self) -> tuple[bytes, bool]:
        """Make it happen, or find that it has: the answer, and whether it is a replay."""
        with self.server.books:
            key = self.headers.get("Idempotency-Key")
            if key in self.server.answers:
                return self.server.answers[key], True
            self.server.effects.append(self.body)
            answer = json.dumps({"number": len(self.server.effects)}).encode()
            if key is not None:
                self.server.answers[key] = answer
            return answer, False

    def reply(self, status: int, body: bytes = b"{}", **headers: str) -> None:
        self.send_response(status)
        lines = {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
        for name, value in lines.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def cut(self) -> None:
        """Break the connection, with a reset."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.connection.close()
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is worth a line."""


def behave(handler: Handler) -> None:
    body, replayed = handler.effect()
    handler.reply(200, body, **({"X_Idempotency_Replayed": "true"} if replayed else {}))


def drip(handler: Handler, *, chunked: bool) -> None:
    """Answer a byte at a time, for as long as somebody listens."""
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    length = ("Transfer-Encoding", "chunked") if chunked else ("Content-Length", "1000000")
    handler.send_header(*length)
    handler.end_headers()
    try:
        while not handler.server.released.wait(0.001):
            handler.wfile.write(b"1\r\n \r\n" if chunked else b" ")
            handler.server.drips += 1
    except OSError:
        handler.server.hung.set()
        handler.close_connection = True


def cut_before(handler: Handler) -> None:
    handler.cut()


def cut_after(handler: Handler) -> None:
    handler.effect()
    handler.cut()


def cut_within_head(handler: Handler) -> None:
    handler.effect()
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Le")
    handler.cut()


def cut_within_body(handler: Handler) -> None:
    body, _ = handler.effect()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body) + 10))
    handler.end_headers()
    handler.wfile.write(body[:4])
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_WR)
    handler.close_connection = True


def cut_within_chunks(handler: Handler) -> None:
    handler.effect()
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b'9\r\n{"number"\r\n')
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_WR)
    handler.close_connection = True


def hang_after(handler: Handler) -> None:
    handler.effect()
    handler.server.hung.set()
    handler.server.released.wait(60)
    handler.cut()


def hang_before(handler: Handler) -> None:
    handler.server.hung.set()
    handler.server.released.wait(60)
    handler.cut()


def garbage(handler: Handler) -> None:
    handler.effect()
    handler.wfile.write(b"SSH-2.0-nobody speaks HTTP here\r\n\r\n")
    handler.cut()


def running(handler: Handler) -> None:
    problem = json.dumps({"code": "in-progress", "retryable": True}).encode()
    handler.reply(409, problem, Content_Type="application/problem+json", Retry_After="100")


def status(code: int, **headers: str) -> Step:
    return lambda handler: handler.reply(code, b"{}", **headers)


@contextmanager
def listening(port: int = 0) -> Iterator[Server]:
    with Server(port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    with listening() as server:
        yield server


# The clients


class Got(NamedTuple):
    status: int
    value: Any
    delivery: Delivery | None


class Httpx:
    """A blocking client."""

    def post(
        self, url: str, body: Any = b"{}", *, method: str = "POST", timeout: Any = 5.0, **choices: Any
    ) -> Got:
        with httpx.Client(transport=IdempotencyTransport(**{"rules": QUICK, **choices})) as client:
            response = client.request(method, url, content=body, timeout=timeout, follow_redirects=True)
            return Got(
                response.status_code, response.json() if response.content else None, delivery(response)
            )

    trouble: tuple[type[Exception], ...] = (httpx.TransportError,)


class AsyncHttpx:
    """A client on an event loop."""

    def post(
        self, url: str, body: Any = b"{}", *, method: str = "POST", timeout: Any = 5.0, **choices: Any
    ) -> Got:
        if "sleep" in choices:
            slept = choices.pop("sleep")

            async def sleep(seconds: float) -> None:
                slept(seconds)

            choices["sleep"] = sleep

        async def pieces() -> AsyncIterator[bytes]:
            for piece in body:
                yield piece

        async def awaited() -> Got:
            transport = AsyncIdempotencyTransport(**{"rules": QUICK, **choices})
            content = body if isinstance(body, bytes) else pieces()
            async with httpx.AsyncClient(transport=transport) as client:
                response = await client.request(
                    method, url, content=content, timeout=timeout, follow_redirects=True
                )
                return Got(
                    response.status_code, response.json() if response.content else None, delivery(response)
                )

        return asyncio.run(awaited())

    trouble: tuple[type[Exception], ...] = (httpx.TransportError,)


class Requests:
    """A session."""

    def post(
        self, url: str, body: Any = b"{}", *, method: str = "POST", timeout: Any = 5.0, **choices: Any
    ) -> Got:
        with requests.Session() as session:
            adapter = IdempotencyAdapter(**{"rules": QUICK, **choices})
            session.mount("http://", adapter)
            session.mount("https://", adapter)
            response = session.request(method, url, data=body, timeout=timeout)
            return Got(
                response.status_code, response.json() if response.content else None, delivery(response)
            )

    trouble: tuple[type[Exception], ...] = (requests.ConnectionError, requests.Timeout)


Client = Httpx | AsyncHttpx | Requests


@pytest.fixture(params=[Httpx(), AsyncHttpx(), Requests()], ids=lambda each: type(each).__name__.lower())
def client(request: pytest.FixtureRequest) -> Client:
    """Each in turn."""
    chosen: Client = request.param
    return chosen


def one_key(server: Server) -> bool:
    return len(set(server.keys)) == 1 and None not in server.keys


# One effect, whatever happens


@pytest.mark.parametrize(
    "trouble",
    [
        cut_before,
        cut_after,
        cut_within_head,
        cut_within_body,
        cut_within_chunks,
        garbage,
        running,
        *[status(code) for code in (408, 425, 429, 500, 502, 503, 504)],
    ],
    ids=lambda step: getattr(step, "__name__", "status"),
)
def test_trouble_that_passes_is_followed_by_the_answer(client: Client, server: Server, trouble: Step) -> None:
    """Three times over, before or after the effect: it happens once, under one key."""
    server.script += [trouble] * 3
    got = client.post(server.url + "/charges", b'{"cents": 500}')
    assert (got.status, got.value) == (200, {"number": 1})
    assert server.effects == [b'{"cents": 500}']
    assert len(server.keys) == 4
    assert one_key(server)
    assert got.delivery is not None
    assert got.delivery.attempts == 4
    assert f'"{got.delivery.key}"' == server.keys[0]


def test_everything_at_once(client: Client, server: Server) -> None:
    """The answer that arrives in the end is the first one, and says so."""
    server.script += [cut_before, cut_after, running, status(503), cut_within_body, running, status(429)]
    got = client.post(server.url)
    assert got.value == {"number": 1}
    assert got.delivery is not None
    assert got.delivery.replayed
    assert (len(server.effects), len(server.keys), one_key(server)) == (1, 8, True)


def test_a_time_out_after_the_effect(client: Client, server: Server) -> None:
    """The client gives up on the answer, not on the request."""
    server.script += [hang_after]
    got = client.post(server.url, timeout=0.2)
    assert got.value == {"number": 1}
    assert got.delivery is not None
    assert got.delivery.attempts >= 2
    assert got.delivery.replayed
    assert len(server.effects) == 1


def test_a_server_that_is_not_there_yet(client: Client) -> None:
    """Refused connections are tried again until it listens."""
    with Server() as gone:
        port = gone.server_address[1]
    waits: list[float] = []
    with ExitStack() as stack:

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                stack.enter_context(listening(port))

        assert client.post(f"http://127.0.0.1:{port}", sleep=sleep).value == {"number": 1}
    assert len(waits) == 3


def test_the_budget_bounds_it_all(client: Client, server: Server) -> None:
    """A server that never answers: an error, in about that time, though no time-out was set."""
    server.script += [hang_before] * 99
    began = time.monotonic()
    with pytest.raises(client.trouble) as raised:
        client.post(server.url, timeout=None, rules=Rules(budget="400ms", backoff="1ms"))
    assert time.monotonic() - began < 5.0
    assert any(server.keys[0] in note for note in raised.value.__notes__ if server.keys[0])
    assert server.effects == []


@pytest.mark.parametrize("kind", ["of known length", "chunked"])
def test_an_answer_that_drips_is_given_up_with_the_budget(client: Client, server: Server, kind: str) -> None:
    """However small the pieces are, and though each of them comes in time. A second passes with every byte."""
    server.script += [partial(drip, chunked=kind == "chunked")]
    with pytest.raises(client.trouble, match="budget"):
        client.post(server.url, monotonic=lambda: float(server.drips))
    assert server.drips >= 20
    wait_until(server.hung.is_set, what="That the server sees that nobody listens")
    assert len(server.keys) == 1


@pytest.mark.parametrize("code", [400, 401, 404, 409, 410, 422])
def test_a_refusal_arrives_at_once(client: Client, server: Server, code: int) -> None:
    """One try."""
    server.script += [status(code)]
    assert client.post(server.url).status == code
    assert len(server.keys) == 1


@pytest.mark.parametrize("kind", ["seconds", "date"])
def test_retry_after_is_followed(client: Client, server: Server, kind: str) -> None:
    """In both of its forms; without sleeping here."""
    asked = "30" if kind == "seconds" else formatdate(time.time() + 30, usegmt=True)
    server.script += [status(503, Retry_After=asked)]
    slept: list[float] = []
    assert client.post(server.url, rules=Rules(backoff="1ms"), sleep=slept.append).status == 200
    assert 29.0 <= slept[0] <= 31.0


def test_a_retry_after_beyond_the_budget_is_the_answer(client: Client, server: Server) -> None:
    """There is no point in waiting less."""
    server.script += [status(503, Retry_After="3600")]
    assert client.post(server.url).status == 503
    assert len(server.keys) == 1


def test_a_get_passes_through(client: Client, server: Server) -> None:
    """Without a key, and with its trouble."""
    server.script += [status(503)]
    assert client.post(server.url, b"", method="GET").status == 503
    server.script += [cut_before]
    with pytest.raises(client.trouble):
        client.post(server.url, b"", method="GET")
    assert server.keys == [None, None]


def test_a_stream_is_sent_again_if_it_is_short(client: Client, server: Server) -> None:
    """Chunked as it was; a long one is sent once, whole, with a key."""
    server.script += [cut_after, status(503)]
    assert client.post(server.url, iter([b"one ", b"two"])).value == {"number": 1}
    assert server.effects == [b"one two"]
    server.script += [status(503)]
    long = [b"x" * 700, b"y" * 700]
    assert client.post(server.url, iter(long), rules=Rules(buffer=1000)).status == 503
    assert client.post(server.url, iter(long), rules=Rules(buffer=1000)).status == 200
    assert server.effects[1] == b"".join(long)
    assert None not in server.keys


def test_a_redirected_request_gets_its_own_key(client: Client, server: Server) -> None:
    """With its body, streamed or not; each key is kept on every try."""
    for body in (b"one two", iter([b"one ", b"two"])):
        server.keys.clear()
        server.paths.clear()
        server.script += [cut_before, status(307, Location="/v2"), cut_after]
        assert client.post(server.url + "/v1", body).status == 200
        assert server.paths == ["/v1", "/v1", "/v2", "/v2"]
        assert server.keys[0] == server.keys[1] != server.keys[2] == server.keys[3]
    assert server.effects == [b"one two"] * 2


def test_a_file_is_sent_again_and_redirected(server: Server, tmp_path: Path) -> None:
    """Left alone, requests would wind it back; here it is held."""
    (tmp_path / "body").write_bytes(b"content")
    server.script += [cut_before, status(307, Location="/v2"), cut_after]
    with (tmp_path / "body").open("rb") as file:
        assert Requests().post(server.url, file).status == 200
    assert server.effects == [b"content"]


@pytest.mark.filterwarnings("ignore::requests.exceptions.FileModeWarning")
@pytest.mark.parametrize("form", ["file", "StringIO", "pieces"])
def test_a_text_is_sent_as_its_bytes(server: Server, tmp_path: Path, form: str) -> None:
    """A file in text mode ends with an empty text, which is no empty bytes."""
    (tmp_path / "body").write_text("contênt", encoding="utf-8")
    server.script += [cut_before]
    with (tmp_path / "body").open(encoding="utf-8") as file:
        bodies = {"file": file, "StringIO": StringIO("contênt"), "pieces": iter(["cont", "ênt"])}
        assert Requests().post(server.url, bodies[form]).status == 200
    assert server.effects == ["contênt".encode()]


def cut_short(handler: Handler) -> None:
    """Do it, and answer with half of what was announced."""
    answer, _ = handler.effect()
    handler.send_response(200)
    handler.send_header("Content-Type", "text/plain")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"%x\r\n%b\r\n" % (5, answer[:5]))
    handler.close_connection = True


def test_a_short_answer_in_chunks_that_is_cut_off_is_asked_for_again(client: Client, server: Server) -> None:
    """Whatever its type: the status was there, but the answer was not."""
    server.script += [cut_short]
    got = client.post(server.url)
    assert (got.status, got.value, len(server.effects), one_key(server)) == (200, {"number": 1}, 1, True)


@pytest.mark.parametrize("way", ["iter_content", "content", "raw", "closed"])
def test_a_streamed_response_of_requests_is_settled_when_it_has_been_read(
    server: Server, tmp_path: Path, way: str
) -> None:
    """Or when its reader has enough of it. One that is cut off leaves the request in doubt."""
    journal = Journal(tmp_path / "sent.db")
    ways: dict[str, Callable[[requests.Response], Any]] = {
        "iter_content": lambda response: b"".join(response.iter_content(3)),
        "content": lambda response: response.content,
        "raw": lambda response: list(iter(lambda: response.raw.read(3), b"")),
        "closed": lambda response: next(response.iter_content(3)),
    }
    server.script += [cut_short]
    with requests.Session() as session, named("invoice-77"):
        session.mount("http://", IdempotencyAdapter(rules=QUICK, journal=journal))
        with session.post(server.url, data=b"{}", stream=True) as response:
            if way != "closed":
                with pytest.raises((requests.RequestException, urllib3.exceptions.HTTPError)) as cut:
                    ways[way](response)
                assert any(str(server.keys[0]) in note for note in all_notes(cut.value))
        assert len(journal.in_doubt()) == (way != "closed")
        response = session.post(server.url, data=b"{}", stream=True)
        ways[way](response)
        if way == "closed":
            response.close()
        assert (journal.in_doubt(), one_key(server)) == ([], True)


def all_notes(error: BaseException | None) -> list[str]:
    """The notes of an error, and of those behind it."""
    return [] if error is None else [*getattr(error, "__notes__", []), *all_notes(error.__context__)]


def test_a_streamed_response_of_requests_is_not_read_before_its_reader(server: Server) -> None:
    """Its problem documents are: they decide whether to ask again."""
    server.script += [running]
    with requests.Session() as session:
        session.mount("http://", IdempotencyAdapter(rules=QUICK))
        with session.post(server.url, data=b"{}", stream=True) as response:
            assert not response._content_consumed
            assert b"".join(response.iter_content()) == b'{"number": 1}'
            assert response.effectonce.attempts == 2  # type: ignore[attr-defined]


def test_many_threads_share_a_transport(server: Server) -> None:
    """Each request has its own key and its own answer."""
    transport = IdempotencyTransport(rules=QUICK)
    answers: list[int] = []
    server.script += [cut_after, cut_before, running, status(503)] * 10

    def work() -> None:
        for _ in range(5):
            answers.append(client.post(server.url, content=b"{}").json()["number"])

    with httpx.Client(transport=transport) as client:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(answers) == list(range(1, 41))
    assert len(server.effects) == 40


def test_a_certificate_that_is_not_trusted_is_no_trouble_that_passes(
    client: Client, server: Server, tmp_path: Path
) -> None:
    """The next try would meet the same one."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    subprocess.run(
        [*made, "-keyout", tmp_path / "key", "-out", tmp_path / "cert"], check=True, capture_output=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    slept: list[float] = []
    with pytest.raises(client.trouble):
        client.post(server.url.replace("http:", "https:"), sleep=slept.append)
    assert slept == []


# Names, across restarts

PROGRAM = """
import sys
import httpx, requests
from effectonce.http.client import IdempotencyAdapter, IdempotencyTransport, Journal, Rules, delivery, named
which, path, url = sys.argv[1:]
choices = {"journal": Journal(path), "rules": Rules(backoff="2ms")}
with named("invoice-77"):
    if which == "httpx":
        response = httpx.Client(transport=IdempotencyTransport(**choices)).post(url, content=b"pay")
    else:
        session = requests.Session()
        session.mount("http://", IdempotencyAdapter(**choices))
        response = session.post(url, data=b"pay")
print(response.text, delivery(response).replayed)
"""


@pytest.mark.parametrize("which", ["httpx", "requests"])
@pytest.mark.parametrize("moment", [hang_before, hang_after])
def test_a_killed_program_finds_its_key_again(
    server: Server, tmp_path: Path, which: str, moment: Step
) -> None:
    """With kill -9, before or after the effect. Started again, it gets the answer of one effect."""
    command = [sys.executable, "-c", PROGRAM, which, str(tmp_path / "sent.db"), server.url]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    server.script += [moment]
    killed = subprocess.Popen(command, env=environment)
    wait_until(server.hung.is_set, what="the request")
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(30) == -signal.SIGKILL
    assert [entry.name for entry in Journal(tmp_path / "sent.db").in_doubt()] == ["invoice-77"]
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert again.stdout.split() == ['{"number":', "1}", str(moment is hang_after)]
    assert server.effects == [b"pay"]
    assert one_key(server)
    assert Journal(tmp_path / "sent.db").in_doubt() == []


def test_a_block_names_requests_of_every_client(client: Client, server: Server, tmp_path: Path) -> None:
    """The same name is the same request, whoever sends it."""
    journal = Journal(tmp_path / "sent.db")
    for _ in range(2):
        with named("invoice-77"):
            got = client.post(server.url, b"pay", journal=journal)
        assert got.value == {"number": 1}
    assert got.delivery is not None
    assert (got.delivery.name, got.delivery.replayed) == ("invoice-77", True)
    assert len(server.effects) == 1


# With our own server side


def test_client_and_middleware_together(client: Client) -> None:
    """A handler slower than the client's patience: time-out, in-progress, polled, and the first answer."""
    from effectonce.http.asgi import IdempotencyMiddleware

    runs: list[int] = []
    finish = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        runs.append(1)
        await asyncio.to_thread(finish.wait, 30)
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x-made", b"here")]})
        await send({"type": "http.response.body", "body": b'{"charged": 1}'})

    polls: list[float] = []

    def sleep(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) == 3:
            finish.set()

    with (
        Receiver("memory://") as receiver,
        serving(IdempotencyMiddleware(app, receiver, scope=PUBLIC)) as url,
    ):
        got = client.post(url, timeout=0.5, sleep=sleep)
    assert (got.status, got.value) == (201, {"charged": 1})
    assert got.delivery is not None
    assert got.delivery.replayed
    assert len(runs) == 1


class Serving(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        """The signals belong to whoever runs the tests."""


@contextmanager
def serving(app: Any) -> Iterator[str]:
    server = Serving(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started, what="uvicorn")
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
