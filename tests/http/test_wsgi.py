"""The WSGI middleware between a server and an app, each of which ``wsgiref.validate`` watches over its shoulder."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

import httpx
import pytest
from tests.unit.receiving import ClosedMeanwhile, must_not_run

from effectonce import NotApplied, Policy, Receiver, current
from effectonce._blocking import run
from effectonce.errors import StoreUnavailable, UsageError
from effectonce.http import PUBLIC, Request, Route, nothing_happened, remember
from effectonce.http._intake import IN_MEMORY, PIECE
from effectonce.http.asgi import IdempotencyMiddleware as ASGIMiddleware
from effectonce.http.wsgi import IdempotencyMiddleware
from effectonce.stores.memory import MemoryStore

StartResponse = Callable[..., Any]
App = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]

TEXT = [("Content-Type", "text/plain")]


class Clock:
    """Time that passes when it is told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Server:
    """A WSGI server for one app, in this process. ``sent`` is what came last."""

    def __init__(
        self,
        app: App,
        *,
        clock: Callable[[], float] | None = None,
        valid: bool = True,
        store: Any = "memory://",
        **words: Any,
    ) -> None:
        store = store if clock is None else MemoryStore(clock=clock)
        clocks: dict[str, Any] = {} if clock is None else {"monotonic": clock}
        self.events: list[str] = []
        hooks = [lambda event: self.events.append(event.kind)]
        self.receiver = Receiver(store, hooks=hooks, **clocks)
        inside = validator(app) if valid else app
        self._app = validator(IdempotencyMiddleware(inside, self.receiver, **({"scope": PUBLIC} | words)))
        self.started: list[Any] = []
        self.written: list[bytes] = []
        self.errors = io.StringIO()

    def environ(self, body: bytes = b"", **more: Any) -> dict[str, Any]:
        environ: dict[str, Any] = {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": "/pay",
            "SCRIPT_NAME": "",
            "QUERY_STRING": "",
            "CONTENT_LENGTH": str(len(body)),
            "CONTENT_TYPE": "text/plain",
            "HTTP_IDEMPOTENCY_KEY": "key",
            "wsgi.input": io.BytesIO(body),
            "wsgi.errors": self.errors,
        }
        setup_testing_defaults(environ)
        return {name: value for name, value in (environ | more).items() if value is not None}

    def open(self, body: bytes = b"", **more: Any) -> Any:
        """What the middleware gives to the server, neither read nor closed yet."""
        self.started, self.written = [], []
        return self._app(self.environ(body, **more), self._start)

    def send(self, body: bytes = b"", **more: Any) -> tuple[int, dict[str, str], bytes]:
        """The status, the headers and the body that a client gets."""
        pieces = self.open(body, **more)
        try:
            sent = b"".join([*pieces])
        finally:
            pieces.close()
        status, headers = self.started[-1]
        return (
            int(status[:3]),
            {name.lower(): value for name, value in headers},
            b"".join(self.written) + sent,
        )

    def _start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[..., Any]:
        if exc_info and self.written:
            raise exc_info[1]
        self.started.append((status, headers))
        return self.written.append


def answering(*pieces: bytes, status: str = "200 OK", headers: Any = TEXT) -> App:
    """An app that always answers so."""

    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        start_response(status, list(headers))
        return list(pieces)

    return app


class Answer:
    """An iterable that knows whether it was closed, and can fail."""

    def __init__(self, *pieces: bytes | Exception, on_close: Exception | None = None) -> None:
        self.pieces, self.closed, self._on_close = iter(pieces), 0, on_close

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        piece = next(self.pieces)
        if isinstance(piece, Exception):
            raise piece
        return piece

    def close(self) -> None:
        self.closed += 1
        if self._on_close is not None:
            raise self._on_close


# -- What is not covered -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        {"REQUEST_METHOD": "GET"},
        {"PATH_INFO": "/free"},
        {"PATH_INFO": "/maybe", "HTTP_IDEMPOTENCY_KEY": None},
    ],
)
def test_what_is_not_covered_is_the_apps_own_business(request_: dict[str, Any]) -> None:
    """The very same environ, start_response and iterable: the middleware is not there."""
    seen: list[Any] = []
    answer = [b"pieces"]

    def app(environ: Any, start_response: Any) -> Any:
        seen.append((environ, start_response))
        return answer

    routes = [Route("/free", covered=False), Route("/maybe", required=False)]
    middleware = IdempotencyMiddleware(app, Receiver("memory://"), scope=PUBLIC, routes=routes)
    environ = Server(app).environ(**request_)
    before = dict(environ)
    start_response = object()
    assert middleware(environ, start_response) is answer  # type: ignore[arg-type]
    assert seen[0][0] is environ and seen[0][1] is start_response
    assert environ == before


@pytest.mark.filterwarnings("ignore:Unknown REQUEST_METHOD")
@pytest.mark.parametrize(
    "trick", [{"REQUEST_METHOD": "post"}, {"PATH_INFO": "/put/a\nb", "REQUEST_METHOD": "PUT"}]
)
def test_what_is_covered_can_not_be_tricked_out_of_it(trick: dict[str, Any]) -> None:
    """By small letters, which frameworks take for large ones; by line breaks, which patterns stumble over."""
    server = Server(answering(), routes=[Route("/put/**", methods={"PUT"})])
    assert server.send(HTTP_IDEMPOTENCY_KEY=None, **trick)[0] == 400


# -- What the app may do -------------------------------------------------------------------------------------------


def test_what_arrives_while_the_receiver_is_closed_never_begins(tmp_path: Path) -> None:
    """Not even if it is closed between the claim and the app. The key is given back."""
    server = Server(must_not_run, store=f"sqlite:///{tmp_path / 'e.db'}")
    server.receiver._keeper.live = ClosedMeanwhile(server.receiver)
    status, _, body = server.send()
    assert (status, b"unavailable" in body) == (503, True)
    server.receiver.close()
    with Receiver(f"sqlite:///{tmp_path / 'e.db'}") as other:
        assert run(other.store.stats()).by_state == {"ABSENT": 1}


def test_an_app_may_write() -> None:
    """The callable of ``start_response`` is as good as the iterable, and comes before it."""

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        write = start_response("200 OK", TEXT)
        write(b"one ")
        write(b"two ")
        return [b"three"]

    server = Server(app)
    assert [server.send()[2] for _ in range(2)] == [b"one two three"] * 2
    assert server.events.count("replayed") == 1


def test_an_app_may_write_more_than_can_be_held() -> None:
    """Then it writes through, and the repeat hears that it was done."""

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        write = start_response("200 OK", TEXT)
        for _ in range(4):
            write(b"x" * 40)
        return [b"end"]

    server = Server(app, max_response=100)
    assert server.send()[2] == b"x" * 160 + b"end"
    assert server.send()[0] == 409


@pytest.mark.parametrize("when", ["before its pieces", "with its first piece"])
@pytest.mark.parametrize("content_type", ["text/event-stream", "text/plain"])
def test_an_app_that_wrote_a_stream_may_go_on_with_pieces(when: str, content_type: str) -> None:
    """The answer has begun then: it is recorded once and started once, and comes whole and in order."""

    def begin(start_response: Any) -> None:
        write = start_response("200 OK", [("Content-Type", content_type)])
        write(b"1" * 60)
        write(b"2" * 60)

    def pieces(start_response: Any) -> Iterator[bytes]:
        if when == "with its first piece":
            begin(start_response)
        yield b"3" * 120
        yield b"4"

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        if when == "before its pieces":
            begin(start_response)
        return pieces(start_response)

    server = Server(app, max_response=100)
    assert server.send()[2] == b"1" * 60 + b"2" * 60 + b"3" * 120 + b"4"
    assert server.events.count("completed") == 1
    assert server.send()[0] == 409


def test_an_app_may_call_start_response_with_its_first_piece() -> None:
    """As a generator does."""

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("201 Created", TEXT)
        yield b"late"

    server = Server(app)
    assert [server.send()[::2] for _ in range(2)] == [(201, b"late")] * 2


def test_an_app_may_take_back_what_it_said() -> None:
    """With ``exc_info``, as long as nothing is on its way: what counts is what it said last."""

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", TEXT)
        yield b"half an ans"
        try:
            raise RuntimeError
        except RuntimeError:
            start_response("402 Payment Required", TEXT, sys.exc_info())
        yield b"sorry"

    server = Server(app)
    assert [server.send()[::2] for _ in range(2)] == [(402, b"sorry")] * 2


def test_an_app_can_not_take_back_what_is_on_its_way() -> None:
    """Then the server says so, as it would without the middleware; it was done, and is not run again."""

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        write = start_response("200 OK", TEXT)
        write(b"x" * 200)
        try:
            raise RuntimeError("too late")
        except RuntimeError:
            start_response("500 Internal Server Error", TEXT, sys.exc_info())
        return []

    server = Server(app, max_response=100)
    with pytest.raises(RuntimeError, match="too late"):
        server.open()
    assert server.send()[0] == 409


@pytest.mark.parametrize(
    "app", [lambda environ, start_response: None, lambda environ, start_response: [b"x"]]
)
def test_an_app_that_breaks_the_rules_of_wsgi_has_failed(app: Any) -> None:
    """No iterable, no start_response: an error for the server, and the key is free again."""
    server = Server(app, valid=False)
    for _ in range(2):
        with pytest.raises((TypeError, AssertionError)):
            server.send()
    assert server.events.count("released") == 2


def test_an_app_that_answers_with_text_has_failed() -> None:
    """WSGI is made of bytes."""
    server = Server(answering("text"), valid=False)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="str instead of bytes"):
        server.send()
    assert server.events.count("released") == 1


def test_an_app_knows_its_attempt_everywhere() -> None:
    """In the call, in the iterable, in its close, in what is streamed after the record; and nowhere afterwards."""
    seen: list[str] = []

    class Pieces(Answer):
        def __next__(self) -> bytes:
            seen.append(current().key)
            return super().__next__()

        def close(self) -> None:
            seen.append("closed")
            super().close()

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        seen.append(current().key)
        start_response("200 OK", TEXT)
        return Pieces(b"x" * 60, b"x" * 60, b"x" * 60)

    assert len(Server(app, max_response=100).send()[2]) == 180
    assert seen == ["public|http||key"] * 5 + ["closed"]
    for outside in (current, remember, nothing_happened):
        with pytest.raises(UsageError):
            outside()


def test_an_app_reads_its_body_as_from_the_server() -> None:
    """By length, by lines, to the end; a large one from the disk."""
    lines = [b"%d\n" % number for number in range(200_000)]
    body = b"".join(lines)
    assert len(body) > IN_MEMORY

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        stream = environ["wsgi.input"]
        start_response("200 OK", TEXT)
        pieces = [stream.read(1), stream.readline(), *stream.readlines(1), *stream, stream.read(5)]
        return [str(b"".join(pieces) == body).encode()]

    assert Server(app).send(body)[2] == b"True"


def test_an_app_finds_a_body_of_chunks_with_its_length() -> None:
    """The server has taken the chunks away; what is left is a body that ends."""
    seen: list[dict[str, Any]] = []

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        seen.append(environ)
        return answering(b"done")(environ, start_response)

    chunked = {"CONTENT_LENGTH": None, "HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True}
    Server(app).send(b"12345", **chunked)
    assert (seen[0]["CONTENT_LENGTH"], "HTTP_TRANSFER_ENCODING" in seen[0]) == ("5", False)


def test_an_app_that_sends_a_file_is_remembered_too() -> None:
    """A server's own way to send files past the iterable is not offered to it."""

    class Trick:
        def __init__(self, file: Any, size: int = 8192) -> None:
            raise AssertionError("the server would send this file unseen")

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", TEXT)
        return environ["wsgi.file_wrapper"](io.BytesIO(b"a file"), 3)

    server = Server(app)
    assert [server.send(**{"wsgi.file_wrapper": Trick})[2] for _ in range(2)] == [b"a file"] * 2


# -- Closing, and clients that go away -----------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"abc", b"abcde"], ids=["too short", "too long"])
def test_an_answer_that_is_not_as_long_as_it_says_is_not_recorded(body: bytes) -> None:
    """A client would wait for the rest, or take it for the next answer. It is the app's error, so a retry may run."""
    server = Server(answering(body, headers=[*TEXT, ("Content-Length", "4")]))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="said that it answers 4 bytes"):
            server.send()
    assert server.events.count("released") == 2


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
def test_an_answer_that_can_have_no_body_loses_the_one_it_has(status: str) -> None:
    """And its length, so that nobody waits for what isn't sent. What the app did is done, once."""
    server = Server(answering(b"null", status=status, headers=[("Content-Length", "4")]))
    for _ in range(2):
        code, headers, body = server.send()
        assert (code, body, "content-length" in headers) == (int(status[:3]), b"", False)
    assert server.events.count("completed") == 1


def test_the_apps_iterable_is_closed_once_before_its_answer_is_recorded() -> None:
    """Whatever it does on closing, such as ending a transaction, is part of what happened."""
    answers: list[Answer] = []

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", TEXT)
        answers.append(Answer(b"piece", on_close=OSError("could not commit") if not answers else None))
        return answers[-1]

    server = Server(app)
    with pytest.raises(OSError, match="could not commit"):
        server.send()
    assert server.send()[::2] == (200, b"piece")
    assert [answer.closed for answer in answers] == [1, 1]


def test_the_apps_iterable_is_closed_when_it_fails() -> None:
    """And the key is free again."""
    answer = Answer(b"piece", RuntimeError("in the middle"))

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", TEXT)
        return answer

    server = Server(app)
    with pytest.raises(RuntimeError, match="in the middle"):
        server.send()
    assert (answer.closed, server.events.count("released")) == (1, 1)


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_a_stream_closes_the_apps_iterable(begun: bool) -> None:
    """Whether the server had begun to read or not; the record stays."""
    answer = Answer(*[b"x" * 60] * 100)

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", TEXT)
        return answer

    server = Server(app, max_response=100)
    pieces = server.open()
    if begun:
        next(iter(pieces))
    pieces.close()
    assert (answer.closed, server.send()[0]) == (1, 409)


def test_events_are_sent_as_they_come() -> None:
    """The answer has begun before the first event is there, and the record says that it was done."""
    events: list[bytes] = []

    class Events(Answer):
        def __next__(self) -> bytes:
            return events.pop(0)

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [("Content-Type", "Text/Event-Stream; charset=utf-8")])
        return Events()

    server = Server(app)
    pieces = server.open()
    assert server.events.count("completed") == 1
    for event in (b"data: 1\n\n", b"data: 2\n\n"):
        events.append(event)
        assert next(iter(pieces)) == event
    pieces.close()
    assert server.send()[0] == 409


# -- Bodies that don't come as they should -------------------------------------------------------------------------


def test_a_body_that_ends_early_was_never_asked() -> None:
    """The client has left: 400 for whoever still listens."""
    server = Server(answering())
    status, _, body = server.send(b"half", CONTENT_LENGTH="8")
    assert (status, b"request-incomplete" in body, server.events.count("claimed")) == (400, True, 0)


def test_a_body_that_comes_too_slowly_is_refused() -> None:
    """Looked at between two pieces."""
    clock = Clock()

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            clock.now += 40
            return super().read(size)

    server = Server(answering(), clock=clock)
    body = b"x" * (3 * PIECE)
    assert server.send(body, **{"wsgi.input": Slow(body)})[0] == 408
    clock.now = 0.0
    assert server.send(body[: 2 * PIECE], **{"wsgi.input": Slow(body)})[0] == 200


def test_a_body_whose_end_nobody_can_tell_is_refused() -> None:
    """Neither a length nor a server that ends it: an app might read what was not looked at."""
    server = Server(answering())
    status, _, body = server.send(b"12345", CONTENT_LENGTH=None, HTTP_TRANSFER_ENCODING="chunked")
    assert (status, b"length-required" in body) == (411, True)


def test_a_server_that_hides_that_a_body_was_cut_off_must_know_its_length() -> None:
    """As granian, which ends chunks as if they were complete: half would be done, and the whole of it refused."""
    server = Server(answering())
    unknown = {"CONTENT_LENGTH": None, "wsgi.input_terminated": True, "SERVER_SOFTWARE": "Granian"}
    status, headers, body = server.send(b"12345", **unknown, HTTP_TRANSFER_ENCODING="chunked")
    assert (status, b"length-required" in body, headers["idempotency-key"]) == (411, True, "key")
    assert server.send(b"12345", **unknown | {"CONTENT_LENGTH": "5"})[0] == 200
    assert (
        server.send(b"12345", **unknown, HTTP_IDEMPOTENCY_KEY="other")[0] == 200
    )  # of HTTP/2, which has no chunks


@pytest.mark.parametrize("chunked", [False, True])
def test_a_scope_function_may_read_the_body(chunked: bool) -> None:
    """It is there again for the app, and counts as what was asked."""
    heard: list[bytes] = []

    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        heard.append(environ["wsgi.input"].read(100))
        start_response("200 OK", TEXT)
        return []

    server = Server(app, scope=lambda request: request.raw["wsgi.input"].read(3).decode())
    unknown = {"CONTENT_LENGTH": None, "wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}
    words: dict[str, Any] = unknown if chunked else {}
    assert [server.send(body, **words)[0] for body in (b"ann 5", b"ann 9", b"bob 5")] == [200, 422, 200]
    assert heard == [b"ann 5", b"bob 5"]


def test_a_body_that_is_too_large_is_refused_though_a_scope_function_looks_away() -> None:
    """What it was told is not forgotten, and what is left of the body is not taken for the whole."""

    def caller(request: Request) -> str:
        with suppress(Exception):
            b"".join(request.raw["wsgi.input"])
        return "ann"

    server = Server(answering(), scope=caller, max_request=PIECE)
    unknown = {"CONTENT_LENGTH": None, "wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}
    assert server.send(b"x" * (PIECE + 5), **unknown)[0] == 413


def test_a_body_without_a_word_of_its_length_is_empty() -> None:
    """As WSGI has it: nothing is read that may never come."""

    class Waiting(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise AssertionError("would wait for ever")

    server = Server(answering(b"done"))
    assert server.send(CONTENT_LENGTH=None, **{"wsgi.input": Waiting()})[2] == b"done"


def test_a_server_that_fails_to_read_has_asked_nothing() -> None:
    """Its error is its own."""

    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise ConnectionResetError

    server = Server(answering())
    with pytest.raises(ConnectionResetError):
        server.send(b"12345", **{"wsgi.input": Broken()})
    assert server.events.count("claimed") == 0


# -- Errors --------------------------------------------------------------------------------------------------------


def raising(error: BaseException) -> App:
    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        raise error

    return app


def test_an_apps_exception_goes_on_to_the_server() -> None:
    """The very same, after its key is free again."""
    error = ZeroDivisionError("a bug")
    server = Server(raising(error))
    with pytest.raises(ZeroDivisionError) as caught:
        server.send()
    assert (caught.value is error, server.events.count("released")) == (True, 1)


def test_a_remembered_exception_is_written_to_the_servers_log() -> None:
    """The client gets what every repeat will get; nobody has to miss the trace."""
    server = Server(raising(ZeroDivisionError("a bug")), on_server_error="remember")
    first, second = server.send(), server.send()
    assert (first[0], first[2], second[2]) == (500, b"Internal Server Error", b"Internal Server Error")
    assert second[1]["x-idempotency-replayed"] == "true"
    assert server.errors.getvalue().count("ZeroDivisionError: a bug") == 1


@pytest.mark.parametrize("on_server_error", ["release", "remember", "in_doubt"])
def test_an_app_that_says_that_nothing_happened_is_believed(on_server_error: str) -> None:
    """Whatever the policy."""
    server = Server(raising(NotApplied("declined at the door")), on_server_error=on_server_error)
    for _ in range(2):
        with pytest.raises(NotApplied):
            server.send()
    assert server.events.count("released") == 2


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_worker_that_is_told_to_end_leaves_the_claim_to_its_lease(ending: type[BaseException]) -> None:
    """Nobody knows how far the handler got: the key is not free, and nobody renews it."""
    server = Server(raising(ending()))
    with pytest.raises(ending):
        server.send()
    assert server.receiver.flow.keeper.live == {}
    assert server.send()[0] == 409


def test_an_interrupted_record_leaves_the_claim_to_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the handler's end and the record: as above."""
    server = Server(answering(b"done"))

    async def interrupted(completion: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(server.receiver.blocking.store, "complete", interrupted)
        server.send()
    assert server.receiver.flow.keeper.live == {}
    assert server.send()[0] == 409


@pytest.mark.parametrize("size", [10, 200])
def test_an_attempt_that_was_overtaken_gives_the_answer_that_counts(size: int) -> None:
    """Never its own, held or streamed: the client gets what the other attempt has recorded."""
    clock = Clock()
    others: list[tuple[int, dict[str, str], bytes]] = []

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", TEXT)
        # The lease of the first attempt ends before it does, and another is quicker.
        if clock.now == Clock.now:
            clock.now += 1000
            others.append(copy(server).send())
            yield b"x" * size
        yield b"counts"

    server = Server(app, clock=clock, max_response=100)
    status, headers, body = server.send()
    assert (status, headers["x-idempotency-replayed"], body) == (200, "true", b"counts")
    assert others[0][::2] == (200, b"counts")


def test_what_runs_without_a_store_is_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """Where the policy lets it: unprotected, named in the log, and everybody who listens hears of it."""

    class Away(MemoryStore):
        async def claim(self, claim: Any) -> Any:
            raise StoreUnavailable("gone fishing")

    server = Server(answering(b"done"), policy=Policy(fallback="open"))
    server.receiver.blocking.store = Away()
    assert [server.send()[2] for _ in range(2)] == [b"done"] * 2
    assert server.events == ["unprotected"] * 2
    assert [record.name for record in caplog.records if "runs unprotected" in record.message] == [
        "effectonce.http"
    ] * 2


# -- Headers and identity ------------------------------------------------------------------------------------------


def test_headers_of_one_connection_are_not_replayed() -> None:
    """Those that are known, and those that the header Connection names."""
    fleeting = {
        "Connection": "close, X-Hop",
        "X-Hop": "1",
        "Keep-Alive": "5",
        "Trailer": "X-T",
        "Date": "now",
    }
    server = Server(answering(b"", headers=[*TEXT, *fleeting.items()]), valid=False)
    first, second = server.send()[1], server.send()[1]
    names = {name.lower() for name in fleeting}
    assert names <= set(first)
    assert not names & set(second)


@pytest.mark.parametrize("header", [("X-A", "b\r\nX-C: d"), ("X-A", "\0"), ("X A", "b"), ("", "b")])
def test_a_header_that_can_not_be_sent_is_the_apps_error(header: tuple[str, str]) -> None:
    """Found before anything is recorded."""
    server = Server(answering(headers=[header]), valid=False)
    with pytest.raises(ValueError, match="can't be sent"):
        server.send()
    assert server.events.count("released") == 1


def test_a_status_has_a_phrase_always() -> None:
    """Also one that nobody knows; and every repeat has the same."""
    server = Server(answering(status="299 Fine With Me"))
    lines = []
    for _ in range(2):
        server.send()
        lines.append(server.started[-1][0])
    assert lines == ["299 Unknown"] * 2


def test_where_an_app_is_mounted_is_part_of_what_was_asked() -> None:
    """Two apps behind one boundary and one key; rules go by the path that the app sees."""
    server = Server(answering(), routes=[Route("/päy", required=False)])
    assert server.send(SCRIPT_NAME="/a")[0] == 200
    assert server.send(SCRIPT_NAME="/b")[0] == 422
    path = "/päy".encode().decode("latin-1")
    assert server.send(SCRIPT_NAME="/a", PATH_INFO=path, HTTP_IDEMPOTENCY_KEY=None)[0] == 200


def test_a_scope_function_sees_the_request() -> None:
    """Its method, path, query and headers, and what the server has."""
    seen: list[Request] = []

    def scope(request: Request) -> str:
        seen.append(request)
        return request.raw["REMOTE_ADDR"]

    server = Server(answering(), scope=scope)
    server.send(b"12", QUERY_STRING="a=b", HTTP_X_TENANT="t", REMOTE_ADDR="192.0.2.1")
    method, path, query, headers, _ = seen[0]
    assert (method, path, query) == ("POST", "/pay", "a=b")
    assert (headers["x-tenant"], headers["content-length"], headers["content-type"]) == (
        "t",
        "2",
        "text/plain",
    )


# -- Mistakes ------------------------------------------------------------------------------------------------------


async def _later(request: Request) -> str:
    return "later"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ({"scope": "ann"}, "say whose keys"),
        ({"scope": _later}, "can't await"),
        ({"busy": "never"}, "choose one of"),
        ({"retain": "7d"}, "no such rule"),
        ({"claim": "handler"}, "is for ASGI"),
        ({"routes": [Route("/**", claim="handler")]}, "is for ASGI"),
        ({"header": "Idempotency Key"}, "can't be the name of a header"),
        ({"methods": "POST"}, "name methods"),
    ],
)
def test_a_mistake_is_told_when_the_app_is_built(words: dict[str, Any], error: str) -> None:
    """And not with the first request."""
    with pytest.raises(UsageError, match=error):
        Server(answering(), **words)


def test_a_route_that_can_match_nothing_is_a_mistake() -> None:
    """Its rules would be said to nobody."""
    with pytest.raises(UsageError, match="begins with a slash"):
        Route("payments/*", methods={"PUT"})


def test_a_receiver_is_needed() -> None:
    """A URL is none."""
    with pytest.raises(UsageError, match="not a Receiver"):
        IdempotencyMiddleware(answering(), "memory://", scope=PUBLIC)  # type: ignore[arg-type]


def test_a_scope_function_that_gives_no_name_is_a_mistake() -> None:
    """An object, or a coroutine that nobody awaits, would be another caller on every request."""
    coroutine = _later(None)  # type: ignore[arg-type]
    for given in (object(), coroutine):
        with pytest.raises(UsageError, match="Have it give a name"):
            Server(answering(), scope=lambda request, given=given: given).send()
    coroutine.close()


def test_a_policy_of_a_route_is_a_policy() -> None:
    """Fallbacks, leases and all: here, a finished key that is answered without asking the store."""
    server = Server(answering(b"done"), policy=Policy(local_cache=10))
    assert [server.send()[2] for _ in range(2)] == [b"done"] * 2
    assert server.receiver.flow.cache.get("public|http||key") is not None


@pytest.mark.parametrize("path", ["/a%20b", "/caf%C3%A9", "/p%61y", "/a%2Fb", "/a;b=c"])
def test_a_service_that_moves_to_asgi_knows_its_keys_again(path: str) -> None:
    """What was asked is the same to both: the path as apps see it, however it was escaped."""
    server = Server(answering(b"paid"))
    seen = {"PATH_INFO": unquote_to_bytes(path).decode("latin-1"), "QUERY_STRING": "a=%20"}
    assert server.send(b"5 EUR", **seen)[2] == b"paid"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("it was done before")

    async def repeat() -> httpx.Response:
        transport = httpx.ASGITransport(ASGIMiddleware(app, server.receiver, scope=PUBLIC))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.post(f"{path}?a=%20", content=b"5 EUR", headers={"Idempotency-Key": "key"})

    response = asyncio.run(repeat())
    assert (response.content, response.headers["x-idempotency-replayed"]) == (b"paid", "true")
