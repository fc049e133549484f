"""WSGI: ``IdempotencyMiddleware(app, receiver, scope=…)`` for Flask, Django, Bottle, Pyramid and every other app.

A covered request's body is read first, because it is part of what was asked. Then the app runs to its end, its iterable
is consumed and closed, and what it answered is recorded; only then does the server get the first byte. So a client that
goes away, and a server that can't write to it, change nothing. A response that is too large to hold, or has no end, is
recorded as done without its body and then streamed. Every other request passes through untouched.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import IO, Any, Unpack
from wsgiref.util import FileWrapper

from .._blocking import run
from .._receiver import Receiver
from ..errors import ColourMismatch
from ._boundary import Boundary, Exchange, claimed_here, key_in, natural_key, refused
from ._exchange import PUBLIC, Answer, Hasher, Problem, body_of, pairs_of, start_of
from ._intake import OnDemand, take_in_from, whole
from ._names import checked_scope
from ._rules import Request, Route, Rules, RuleWords, Scope
from ._wishes import unheard

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
App = Callable[[Any, Any], Iterable[bytes]]

_UNPREFIXED = ("CONTENT_TYPE", "CONTENT_LENGTH")
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


class IdempotencyMiddleware:
    """Every covered request of an app happens once.

    ``scope`` says whose keys these are: a function of the request that gives the caller's name, or ``PUBLIC``.
    ``routes`` and further words: see ``effectonce.http.Route`` and ``Rules``. Paths are those that the app sees.
    """

    def __init__(
        self,
        app: App,
        receiver: Receiver,
        *,
        scope: Scope,
        routes: Iterable[Route] = (),
        **rules: Unpack[RuleWords],
    ) -> None:
        if inspect.iscoroutinefunction(scope):
            raise ColourMismatch(f"{scope!r} is a coroutine function, and a WSGI app can't await it.")
        self.app = app
        self.boundary = claimed_here(Boundary(receiver, scope, routes, **rules))

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        rules = self.rules_for(environ)
        if rules is None:
            return self.app(environ, start_response)
        lines = lines_of(environ, rules.header)
        try:
            key = key_in(rules, lines)
            if key is not None or rules.key is not None:
                return _Covered(self, rules, environ, start_response).run(key)
        except Problem as problem:
            return _send(start_response, refused(problem, rules, lines))
        with unheard():
            return self.app(environ, start_response)

    def rules_for(self, environ: Environ) -> Rules | None:
        """The rules for a request; None if it is not covered."""
        return self.boundary.rules_for(method_of(environ), path_of(environ))

    def scope_of(self, environ: Environ) -> Any:
        """Whose key a request has."""
        return scope_in(self.boundary, environ)


class _Covered:
    """One covered request."""

    exchange: Exchange
    body: IO[bytes]

    def __init__(
        self,
        middleware: IdempotencyMiddleware,
        rules: Rules,
        environ: Environ,
        start_response: StartResponse,
    ) -> None:
        self._middleware, self._rules = middleware, rules
        self._environ, self._start_response = environ, start_response
        self._said: Answer | None = None  # the status and the headers, as the app said them last
        self._length: int | None = None  # of the body, as it said
        self._endless = False
        self._held: list[bytes] = []
        self._size = 0
        self._streams = False  # nothing is held any more: it is recorded, and goes as it comes
        self._server_write: Callable[[bytes], object] | None = None
        self._instead: Answer | None = None  # what counts more than the app's own answer

    def run(self, key: str | None) -> Iterable[bytes]:
        """Answer it, by running the app or without."""
        environ, middleware = self._environ, self._middleware
        hasher = hasher_of(environ, self._rules)
        monotonic = middleware.boundary.receiver.flow.monotonic
        scope, self.body = ask_and_take_in(environ, self._rules, hasher, monotonic, middleware.scope_of)
        if "wsgi.file_wrapper" in environ:  # what a server's own sends past the iterable would go unseen
            environ["wsgi.file_wrapper"] = FileWrapper
        try:
            self.exchange = self.exchange_of(key, scope)
            answer = run(self.exchange.open(hasher.digest()))
            result = self._handle() if answer is None else _send(self._start_response, answer)
        except BaseException:
            self.body.close()
            raise
        if not isinstance(result, _Stream):
            self.body.close()
        return result

    def exchange_of(self, key: str | None, scope: str) -> Exchange:
        """The request on its way through the flow."""
        boundary, lines = self._middleware.boundary, lines_of(self._environ, self._rules.header)
        if key is None:
            key = natural_key(self._rules, request_of(self._environ), whole(self.body))
        return Exchange(boundary, self._rules, boundary.receiver.blocking, key, scope, lines)

    # The app and its answer

    def _handle(self) -> Iterable[bytes]:
        try:
            try:
                with self.exchange.at_work():
                    answer = self._run_app()
            except BaseException as error:
                return _send(self._start_response, self._failed(error))
            if isinstance(answer, _Stream):
                return answer
            return _send(self._start_response, self._instead or run(self.exchange.end(answer)))
        except BaseException:
            self.exchange.abandon()
            raise

    def _run_app(self) -> Answer | _Stream:
        """Run the app until its answer is complete; or until it can't be held: then it is a stream from there on."""
        result = self._middleware.app(self._environ, self._start)
        close: Callable[[], object] = getattr(result, "close", lambda: None)
        try:
            pieces = iter(result)
            if self._endless:
                self._open_stream()
            while not self._streams and (piece := next(pieces, None)) is not None:
                self._hold(piece)
        except BaseException:
            close()
            raise
        if self._streams and self._instead is None:
            return _Stream(self, self._take_held(), pieces, close)
        close()
        said = self._begun()
        return said._replace(body=body_of(said.status, self._length, b"".join(self._held)))

    def _start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> StartResponse:
        """The app's ``start_response``. With ``exc_info`` it takes back what it said, unless that is on its way."""
        if self._streams and self._instead is None:
            self._start_response(status, headers, exc_info)
            return self._write
        if self._said is not None and exc_info is None:
            raise AssertionError("The app called start_response twice.")
        code = int(status[:3])
        pairs, self._length, self._endless = start_of(code, pairs_of(headers))
        self._said = Answer(code, pairs, None)
        self._take_held()
        return self._write

    def _write(self, piece: bytes) -> None:
        """The app's ``write``, as ``start_response`` gives it."""
        if not self._streams:
            self._hold(piece)
            piece = b""
        if self._streams and self._instead is None:
            assert self._server_write is not None, "This server can't write."
            self._server_write(self._take_held() + piece)

    def _hold(self, piece: bytes) -> None:
        """Take a piece of the answer, until it is too much to hold."""
        if not isinstance(piece, bytes):
            raise TypeError(f"The app answered with {type(piece).__name__} instead of bytes.")
        self._held.append(piece)
        self._size += len(piece)
        if self._endless or self._size > self._rules.max_response:
            self._open_stream()

    def _open_stream(self) -> None:
        """Record that it was done, without what it says, and let the response go as it comes."""
        if self._streams:  # an app may write, and go on with pieces
            return
        said = self._begun()
        self._streams = True
        self._instead = run(self.exchange.record(said))
        if self._instead is None:
            self._server_write = self._start_response(*_head(self.exchange.first(said)))

    def _failed(self, error: BaseException) -> Answer:
        """The app raised: what is sent in place of its error, if anything counts more. Else it goes to the server."""
        answer = self._instead if self._streams else run(self.exchange.fail(error))
        if answer is None:
            raise error
        traceback.print_exception(error, file=self._environ["wsgi.errors"])
        return answer

    def _begun(self) -> Answer:
        if self._said is None:
            raise AssertionError("The app answered without start_response.")
        return self._said

    def _take_held(self) -> bytes:
        held = b"".join(self._held)
        self._held.clear()
        self._size = 0
        return held


class _Stream:
    """A response that is recorded without its body: what was held of it, then what comes."""

    def __init__(
        self, covered: _Covered, held: bytes, rest: Iterator[bytes], close: Callable[[], object]
    ) -> None:
        self._covered, self._held, self._rest, self._close = covered, held, rest, close

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._held:
            held, self._held = self._held, b""
            return held
        with self._covered.exchange.at_work():
            return next(self._rest)

    def close(self) -> None:
        """The server is done with it, at its end or before."""
        try:
            self._close()
        finally:
            self._covered.body.close()


def scope_in(boundary: Boundary, environ: Environ) -> Any:
    """What the scope of a boundary says of a request."""
    return boundary.scope_of(request_of(environ)) if callable(boundary.scope) else PUBLIC


def hasher_of(environ: Environ, rules: Rules) -> Hasher:
    """What takes in what a request asks."""
    path = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
    query = environ.get("QUERY_STRING", "")
    return Hasher(method_of(environ), path.encode("latin-1"), query.encode("latin-1"), rules.fingerprint)


def ask_and_take_in(
    environ: Environ,
    rules: Rules,
    hasher: Hasher,
    monotonic: Callable[[], float],
    scope_of: Callable[[Environ], Any],
) -> tuple[str, IO[bytes]]:
    """Whose key a request has, and its body, which is not read before that is known; unless who says it reads it."""
    source = environ["wsgi.input"]

    def take_in() -> IO[bytes]:
        environ["wsgi.input"] = source
        return take_in_from(environ, rules, hasher, monotonic)

    environ["wsgi.input"] = body = OnDemand(take_in)
    try:
        scope, taken = checked_scope(scope_of(environ)), body.taken()
    except BaseException:
        body.close()
        raise
    taken.seek(0)
    return scope, taken


def method_of(environ: Environ) -> str:
    """The method of a request. Some servers hand on small letters, which some frameworks take for the same."""
    method: str = environ["REQUEST_METHOD"]
    return method.upper()


def path_of(environ: Environ) -> str:
    """The path of a request as its app sees it."""
    path: str = environ.get("PATH_INFO", "")
    return path if path.isascii() else path.encode("latin-1").decode("utf-8", "replace")


def request_of(environ: Environ) -> Request:
    """A request as scope and key functions see it."""
    query = environ.get("QUERY_STRING", "")
    return Request(method_of(environ), path_of(environ), query, Headers(environ), environ)


class Headers(Mapping[str, str]):
    """The headers in an environ, by name."""

    def __init__(self, environ: Environ) -> None:
        self._environ = environ

    def __getitem__(self, name: str) -> str:
        return str(self._environ[_variable(name)])

    def __iter__(self) -> Iterator[str]:
        names = (name for name in self._environ if name.startswith("HTTP_") or name in _UNPREFIXED)
        return (name.removeprefix("HTTP_").replace("_", "-").lower() for name in names)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _variable(header: str) -> str:
    """Where an environ has a header."""
    name = header.upper().replace("-", "_")
    return name if name in _UNPREFIXED else f"HTTP_{name}"


def lines_of(environ: Environ, header: str) -> list[bytes]:
    """The lines of a header. Several have become one by now, with commas; so a key of two lines is none."""
    line: str | None = environ.get(_variable(header))
    return [] if line is None else [line.encode("latin-1")]


def _head(answer: Answer) -> tuple[str, list[tuple[str, str]]]:
    """An answer's status and headers as ``start_response`` wants them."""
    line = f"{answer.status} {_PHRASES.get(answer.status, 'Unknown')}"
    return line, [(name.decode("latin-1"), value.decode("latin-1")) for name, value in answer.headers]


def _send(start_response: StartResponse, answer: Answer) -> list[bytes]:
    start_response(*_head(answer))
    return [answer.body or b""]
