"""The client's adapter for requests: what a request of requests is."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, takewhile
from typing import Any, TypeVar, cast

from .._blocking import run
from ..errors import MissingExtra
from ._journal import Journal
from ._retrying import Answer, Headers, Rules, at_most, is_caused_by, length_of, may_tell
from .client import (
    DEFAULT_RULES,
    NAME,
    SHOWN_AS,
    TOO_SLOW,
    Courier,
    Deadline,
    Delivery,
    KeyHeader,
    Settle,
    hold,
)

try:
    import requests
    from requests import adapters, exceptions
except ImportError as error:
    raise MissingExtra("This adapter needs the package requests: pip install effectonce[client]") from error

T = TypeVar("T")


class IdempotencyAdapter(adapters.HTTPAdapter):
    """Gives the requests of a ``requests.Session`` a key and sends them again until there is an answer.

    Takes what an ``HTTPAdapter`` takes, and ``rules``, ``journal``, ``monotonic`` and ``sleep`` as
    ``IdempotencyTransport`` has them.
    """

    # What a pickled session keeps.
    __attrs__: list[str] = [*adapters.HTTPAdapter.__attrs__, "_courier", "_sleep"]  # noqa: RUF012

    def __init__(
        self,
        *args: Any,
        rules: Rules = DEFAULT_RULES,
        journal: Journal | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        **choices: Any,
    ) -> None:
        super().__init__(*args, **choices)
        self._courier, self._sleep = Courier(rules, journal, monotonic), sleep

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: Any = True,
        cert: Any = None,
        proxies: Any = None,
    ) -> requests.Response:
        """Send a request, again where that helps."""

        def send(timeout: Any) -> requests.Response:
            return super(IdempotencyAdapter, self).send(request, stream, timeout, verify, cert, proxies)

        if not self._courier.covers(request.method or ""):
            return send(timeout)
        errand = _RequestsErrand(request, self._courier.rules.header, send, stream, timeout, self._sleep)
        return run(self._courier.deliver(errand))


class _RequestsErrand(KeyHeader):
    """A request of requests."""

    def __init__(
        self,
        request: requests.PreparedRequest,
        header: str,
        send: Callable[[Any], requests.Response],
        stream: bool,
        timeout: Any,
        sleep: Callable[[float], object],
    ) -> None:
        self.request, self.method, self.url = request, request.method or "", request.url or ""
        self.name = NAME.get()
        self._header, self._send, self._stream, self._timeout, self._sleep = (
            header,
            send,
            stream,
            timeout,
            sleep,
        )

    async def body(self, limit: int) -> bytes | None:
        """What is to be sent, if it can be sent again. A short stream becomes bytes."""
        body: Any = self.request.body
        if body is None or isinstance(body, str | bytes | bytearray):
            return body.encode() if isinstance(body, str) else bytes(body or b"")
        if length_of(cast("Headers", self.request.headers)) > limit:
            return None
        rest = _pieces(body)

        async def piece() -> bytes | None:
            return next(rest, None)

        held, whole = await hold(piece, limit)
        content = b"".join(held) if whole else None
        self.request.body = chain(held, rest) if content is None else content
        if content is not None and "Content-Length" in self.request.headers:
            # Of a text, requests counts the characters.
            self.request.headers["Content-Length"] = str(len(content))
        # For redirections: there is no file to wind back any more.
        cast("Any", self.request)._body_position = None
        return content

    async def attempt(self, deadline: Deadline, rules: Rules) -> tuple[requests.Response, Answer]:
        """Send it once, and read the answer unless the caller wants to do so while it comes."""
        response = self._send(_at_most(self._timeout, deadline.left))
        answer = Answer(response.status_code, response.headers)
        telling = may_tell(*answer[:2])
        try:
            content = _content(response, deadline) if telling or not self._stream else b""
        except BaseException:
            response.close()
            raise
        return response, answer._replace(body=content or b"") if telling else answer

    def may_pass(self, error: Exception) -> bool:
        """Broken connections and time-outs may; a bad certificate will be no better the next time."""
        passing = (exceptions.ConnectionError, exceptions.Timeout, exceptions.ChunkedEncodingError)
        return isinstance(error, passing) and not is_caused_by(error, ssl.SSLCertVerificationError)

    async def when_read(self, response: requests.Response, settle: Settle, advice: str) -> None:
        """Settle at once if all of it is here, else when who reads it has come to its end, or closes it."""
        if not self._stream or not hasattr(response.raw, "stream"):
            await settle()
        else:
            _Coming(response, lambda: run(settle()), advice)

    def show(self, response: requests.Response, delivery: Delivery) -> None:
        """Put on the response what it took to get it."""
        setattr(response, SHOWN_AS, delivery)

    async def drop(self, response: requests.Response) -> None:
        """Give up a response and its connection."""
        response.close()

    async def pause(self, seconds: float) -> None:
        """Let time pass."""
        self._sleep(seconds)

    async def aside(self, work: Callable[..., T], *args: Any) -> T:
        """There is no loop to be kept free."""
        return work(*args)


def _pieces(body: Any) -> Iterator[bytes]:
    """A body that is a stream, piece by piece. A text goes as requests itself would send it."""
    pieces: Iterable[Any] = body
    if hasattr(body, "read"):
        pieces = takewhile(bool, iter(lambda: body.read(1 << 16), None))
    for piece in pieces:
        yield piece.encode() if isinstance(piece, str) else piece


class _Coming:
    """A response that is read while it comes: settled once it has been, unless it broke off."""

    def __init__(self, response: requests.Response, settle: Callable[[], None], advice: str) -> None:
        self._response, self._settle, self._advice = response, settle, advice
        self._is_over = False
        self._read, self._stream, self._close = response.raw.read, response.raw.stream, response.close
        response.raw.read, response.raw.stream = self.read, self.stream
        response.close = self.close  # type: ignore[method-assign]

    def read(self, amt: int | None = None, *args: Any, **choices: Any) -> bytes:
        with self._reading():
            piece: bytes = self._read(amt, *args, **choices)
        if amt is None or (amt > 0 and not piece):
            self._end()
        return piece

    def stream(self, *args: Any, **choices: Any) -> Iterator[bytes]:
        with self._reading():
            yield from self._stream(*args, **choices)
        self._end()

    def close(self) -> None:
        self._close()
        self._end()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except GeneratorExit:  # whoever reads it has read enough
            raise
        except BaseException as error:
            self._is_over = True
            error.add_note(self._advice)
            raise

    def _end(self) -> None:
        was_over, self._is_over = self._is_over, True
        if not was_over:
            self._settle()


def _content(response: requests.Response, deadline: Deadline) -> bytes | None:
    """Read a response, and look at the clock whenever something arrives. By itself it waits for large pieces."""
    raw: Any = response.raw
    if not hasattr(raw, "read1"):  # one that somebody made up, and that is here already
        return response.content

    def stream(amount: int, decode_content: bool) -> Iterator[bytes]:
        while piece := raw.read1(amount, decode_content=decode_content):
            yield piece
            if deadline.left < 0:
                raise exceptions.ReadTimeout(TOO_SLOW, request=response.request)

    raw.stream = stream
    try:
        return response.content
    finally:
        del raw.stream


def _at_most(timeout: Any, left: float) -> Any:
    """A time-out of requests that keeps within the budget. One made with urllib3 is taken as it is."""
    if timeout is None or isinstance(timeout, int | float):
        return at_most(timeout, left)
    if isinstance(timeout, tuple) and len(timeout) == 2:
        return tuple(at_most(each, left) for each in timeout)
    return timeout
