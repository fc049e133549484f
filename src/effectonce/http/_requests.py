"""The client's adapter for requests: what a request of requests is."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, TypeVar, cast

from .._blocking import run
from ..errors import MissingExtra
from ._journal import Journal
from ._retrying import Answer, Headers, Rules, at_most, is_caused_by, length_of, may_tell
from .client import DEFAULT_RULES, NAME, SHOWN_AS, TOO_SLOW, Courier, Deadline, Delivery, KeyHeader, hold

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
        rest = iter(lambda: body.read(1 << 16), b"") if hasattr(body, "read") else iter(body)

        async def piece() -> bytes | None:
            return next(rest, None)

        held, whole = await hold(piece, limit)
        self.request.body = b"".join(held) if whole else chain(held, rest)
        # For redirections: there is no file to wind back any more.
        cast("Any", self.request)._body_position = None
        return b"".join(held) if whole else None

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
