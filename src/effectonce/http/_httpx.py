"""The client's transports for httpx: what a request of httpx is, in both colours."""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any, Self, TypeVar

from .._blocking import run
from ..errors import MissingExtra, UsageError
from ._journal import Journal
from ._retrying import Answer, Rules, at_most, is_caused_by, length_of, may_tell
from .client import (
    DEFAULT_RULES,
    NAME,
    NAME_EXTENSION,
    SHOWN_AS,
    Courier,
    Deadline,
    Delivery,
    KeyHeader,
    Settle,
    hold,
)

try:
    import httpx
except ImportError as error:
    raise MissingExtra("This transport needs the package httpx: pip install effectonce[client]") from error

T = TypeVar("T")


class _HttpxErrand(KeyHeader):
    """A request of httpx. What differs between the colours is in the methods that raise NotImplementedError."""

    def __init__(self, request: httpx.Request, header: str) -> None:
        self.request, self.method, self.url, self._header = request, request.method, str(request.url), header
        self.name: str | None = request.extensions.get(NAME_EXTENSION, NAME.get())

    async def body(self, limit: int) -> bytes | None:
        """What is to be sent, if it can be sent again. A short stream becomes bytes."""
        stream = self.request.stream
        if isinstance(stream, httpx.ByteStream):
            return b"".join(stream)
        if length_of(self.request.headers) > limit:
            return None
        pieces, rest = self._taken_up(stream)
        held, whole = await hold(pieces, limit)
        self.request.stream = httpx.ByteStream(b"".join(held)) if whole else rest(held)
        return b"".join(held) if whole else None

    async def attempt(self, deadline: Deadline, rules: Rules) -> tuple[httpx.Response, Answer]:
        """Send it once, and read the answer as far as it is held."""
        response = await self._send(self._copy(deadline.left))
        try:
            return response, await self._read(response, rules, deadline)
        except BaseException:
            await self.drop(response)
            raise

    def _copy(self, left: float) -> httpx.Request:
        """The same request, with no more time than is left."""
        each = self.request
        given = each.extensions.get("timeout", {})
        limits = {name: at_most(given.get(name), left) for name in ("connect", "read", "write", "pool")}
        extensions = {**each.extensions, "timeout": limits}
        return httpx.Request(
            each.method, each.url, headers=each.headers, stream=each.stream, extensions=extensions
        )

    async def _read(self, response: httpx.Response, rules: Rules, deadline: Deadline) -> Answer:
        answer = Answer(response.status_code, response.headers)
        if not rules.holds(response.headers):
            return answer
        stream = response.stream
        pieces, rest = self._taken_up(stream)
        try:
            held, whole = await hold(pieces, rules.buffer, deadline)
        except TimeoutError as late:
            raise httpx.ReadTimeout(str(late), request=self.request) from None
        if not whole:
            response.stream = rest(held)
            return answer
        await self._close(stream)
        content = b"".join(held)
        response.stream = httpx.ByteStream(content)
        return answer._replace(body=_decoded(response, content)) if may_tell(*answer[:2]) else answer

    def may_pass(self, error: Exception) -> bool:
        """Broken connections and time-outs may. What this side did wrong, or a bad certificate, will not."""
        lasting = (httpx.LocalProtocolError, httpx.ProxyError, httpx.UnsupportedProtocol)
        if not isinstance(error, httpx.TransportError) or isinstance(error, lasting):
            return False
        return not is_caused_by(error, ssl.SSLCertVerificationError)

    async def drop(self, response: httpx.Response) -> None:
        """Give up a response and its connection."""
        await self._close(response.stream)

    async def when_read(self, response: httpx.Response, settle: Settle, advice: str) -> None:
        """Settle at once if all of it is here, else when its stream is closed."""
        if isinstance(response.stream, httpx.ByteStream):
            await settle()
        else:
            response.stream = self._coming(response.stream, partial(_advised, advice), settle)

    def show(self, response: httpx.Response, delivery: Delivery) -> None:
        """Put on the response what it took to get it."""
        response.extensions[SHOWN_AS] = delivery

    def _taken_up(self, stream: Any) -> tuple[Callable[[], Awaitable[bytes | None]], Callable[..., Any]]:
        """Begin to read a stream: how to get its next piece, and a stream of pieces read and those to come."""
        raise NotImplementedError

    async def _send(self, request: httpx.Request) -> httpx.Response:
        raise NotImplementedError

    async def _close(self, stream: Any) -> None:
        raise NotImplementedError

    def _coming(self, stream: Any, noted: Callable[[], Any], settle: Settle) -> Any:
        raise NotImplementedError


@contextmanager
def _advised(advice: str) -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as error:
        error.add_note(advice)
        raise


def _decoded(response: httpx.Response, content: bytes) -> bytes:
    """A body as it is meant. It is decoded aside, so that whoever reads the response can still have it raw."""
    try:
        return httpx.Response(response.status_code, headers=response.headers, content=content).content
    except httpx.DecodingError:
        return b""


def _checked(inner: T, kind: type[Any]) -> T:
    if not isinstance(inner, kind):
        raise UsageError(
            f"{inner!r} is not an httpx.{kind.__name__}. Rules are given by name: rules=Rules(...)."
        )
    return inner


class IdempotencyTransport(httpx.BaseTransport):
    """Gives requests a key and sends them again until there is an answer.

    inner      the transport that sends; by default httpx's own
    rules      which requests, after what, for how long
    journal    where the keys of named requests are remembered
    monotonic  the clock that measures the budget
    sleep      lets time pass
    """

    def __init__(
        self,
        inner: httpx.BaseTransport | None = None,
        *,
        rules: Rules = DEFAULT_RULES,
        journal: Journal | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.inner = httpx.HTTPTransport() if inner is None else _checked(inner, httpx.BaseTransport)
        self._courier, self._sleep = Courier(rules, journal, monotonic), sleep

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, again where that helps."""
        if not self._courier.covers(request.method):
            return self.inner.handle_request(request)
        errand = _BlockingErrand(request, self._courier.rules.header, self.inner, self._sleep)
        return run(self._courier.deliver(errand))

    def close(self) -> None:
        """Close the inner transport."""
        self.inner.close()

    def __enter__(self) -> Self:
        self.inner.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self.inner.__exit__(kind, error, traceback)


class AsyncIdempotencyTransport(httpx.AsyncBaseTransport):
    """``IdempotencyTransport`` for an ``httpx.AsyncClient``. It never blocks the loop; cancelled, it stops."""

    def __init__(
        self,
        inner: httpx.AsyncBaseTransport | None = None,
        *,
        rules: Rules = DEFAULT_RULES,
        journal: Journal | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] | None = None,
    ) -> None:
        self.inner = (
            httpx.AsyncHTTPTransport() if inner is None else _checked(inner, httpx.AsyncBaseTransport)
        )
        self._courier, self._sleep = Courier(rules, journal, monotonic), sleep

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, again where that helps."""
        if not self._courier.covers(request.method):
            return await self.inner.handle_async_request(request)
        errand = _AwaitedErrand(request, self._courier.rules.header, self.inner, self._sleep)
        return await self._courier.deliver(errand)

    async def aclose(self) -> None:
        """Close the inner transport."""
        await self.inner.aclose()

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self.inner.__aexit__(kind, error, traceback)


class _BlockingErrand(_HttpxErrand):
    def __init__(
        self,
        request: httpx.Request,
        header: str,
        inner: httpx.BaseTransport,
        sleep: Callable[[float], object],
    ) -> None:
        super().__init__(request, header)
        self._inner, self._sleep = inner, sleep

    async def _send(self, request: httpx.Request) -> httpx.Response:
        return self._inner.handle_request(request)

    def _taken_up(self, stream: Any) -> tuple[Callable[[], Awaitable[bytes | None]], Callable[..., Any]]:
        rest = iter(stream)

        async def piece() -> bytes | None:
            return next(rest, None)

        return piece, lambda held: _Rest(chain(held, rest), stream)

    async def _close(self, stream: Any) -> None:
        stream.close()

    def _coming(self, stream: Any, noted: Callable[[], Any], settle: Settle) -> Any:
        return BlockingComing(stream, noted, lambda: run(settle()))

    async def pause(self, seconds: float) -> None:
        self._sleep(seconds)

    async def aside(self, work: Callable[..., T], *args: Any) -> T:
        return work(*args)


class _AwaitedErrand(_HttpxErrand):
    def __init__(
        self,
        request: httpx.Request,
        header: str,
        inner: httpx.AsyncBaseTransport,
        sleep: Callable[[float], Awaitable[object]] | None,
    ) -> None:
        import anyio  # comes with httpx, and knows every event loop that httpx does
        import anyio.to_thread

        super().__init__(request, header)
        self._inner, self._sleep, self._in_thread = inner, sleep or anyio.sleep, anyio.to_thread.run_sync

    async def _send(self, request: httpx.Request) -> httpx.Response:
        return await self._inner.handle_async_request(request)

    def _taken_up(self, stream: Any) -> tuple[Callable[[], Awaitable[bytes | None]], Callable[..., Any]]:
        rest = aiter(stream)

        async def piece() -> bytes | None:
            return await anext(rest, None)

        return piece, lambda held: _AsyncRest(held, rest, stream)

    async def _close(self, stream: Any) -> None:
        await stream.aclose()

    def _coming(self, stream: Any, noted: Callable[[], Any], settle: Settle) -> Any:
        return AwaitedComing(stream, noted, settle)

    async def pause(self, seconds: float) -> None:
        await self._sleep(seconds)

    async def aside(self, work: Callable[..., T], *args: Any) -> T:
        return await self._in_thread(work, *args)


class _Rest(httpx.SyncByteStream):
    """A stream whose beginning was read already."""

    def __init__(self, pieces: Iterator[bytes], stream: httpx.SyncByteStream) -> None:
        self._pieces, self._stream = pieces, stream

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces

    def close(self) -> None:
        self._stream.close()


class _AsyncRest(httpx.AsyncByteStream):
    def __init__(self, held: list[bytes], rest: AsyncIterator[bytes], stream: httpx.AsyncByteStream) -> None:
        self._held, self._rest, self._stream = held, rest, stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._held:
            yield piece
        async for piece in self._rest:
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Coming:
    """An answer that is read while it comes.

    Whoever has read enough of it closes it, and so settles it. One that broke off can still be asked for.
    """

    _is_over = False

    def __init__(self, stream: Any, noted: Callable[[], Any], settle: Callable[[], Any]) -> None:
        self._stream, self._noted, self._settle = stream, noted, settle

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            with self._noted():
                yield
        except GeneratorExit:  # whoever reads it has read enough
            raise
        except BaseException:
            self._is_over = True
            raise

    def _is_read(self) -> bool:
        """Whether it can be settled now, which it is once."""
        was_over, self._is_over = self._is_over, True
        return not was_over


class BlockingComing(_Coming, httpx.SyncByteStream):
    """In the blocking colour."""

    def __iter__(self) -> Iterator[bytes]:
        with self._reading():
            yield from self._stream

    def close(self) -> None:
        self._stream.close()
        if self._is_read():
            self._settle()


class AwaitedComing(_Coming, httpx.AsyncByteStream):
    """On an event loop."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with self._reading():
            async for piece in self._stream:
                yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()
        if self._is_read():
            await self._settle()
