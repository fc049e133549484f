"""A session's transports for httpx: those of ``client``, with a number for each request."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import httpx

from ..sessions import ClientSession, Request
from ._httpx import AsyncIdempotencyTransport, IdempotencyTransport
from ._numbering import Numbering
from ._retrying import Answer, Rules
from .client import DEFAULT_RULES, NAME, NAME_EXTENSION


class _Numbered:
    """What both colours share."""

    numbering: Numbering

    def begin(self, request: httpx.Request, body: bytes) -> Request:
        name = request.extensions.get(NAME_EXTENSION, NAME.get())
        # Names belong to the session's journal; what sends the request need not know them.
        request.extensions = {**request.extensions, NAME_EXTENSION: None}
        return self.numbering.begin(request.method, str(request.url), request.headers, body, name)

    def answer(self, response: httpx.Response) -> Answer:
        stream = response.stream
        body = b"".join(stream) if isinstance(stream, httpx.ByteStream) else b""
        return Answer(response.status_code, response.headers, body)


class SessionTransport(_Numbered, httpx.BaseTransport):
    """Numbers the requests of an ``httpx.Client`` and sends them again until there is an answer.

    session  a ``ClientSession``
    inner    the transport that sends; by default httpx's own
    rules    as ``IdempotencyTransport`` has them
    """

    def __init__(
        self,
        session: ClientSession,
        inner: httpx.BaseTransport | None = None,
        *,
        rules: Rules = DEFAULT_RULES,
        **choices: Any,
    ) -> None:
        self.numbering = Numbering(session, rules)
        self.inner = IdempotencyTransport(inner, rules=rules, **choices)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, again where that helps."""
        if not self.numbering.covers(request.method):
            return self.inner.handle_request(request)
        numbered = self.begin(request, request.read())
        try:
            response = self.inner.handle_request(request)
        except Exception as error:
            self.numbering.note(numbered, error)
            raise
        self.numbering.settle(numbered, self.answer(response))
        return response

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


class AsyncSessionTransport(_Numbered, httpx.AsyncBaseTransport):
    """``SessionTransport`` for an ``httpx.AsyncClient``. It never blocks the loop."""

    def __init__(
        self,
        session: ClientSession,
        inner: httpx.AsyncBaseTransport | None = None,
        *,
        rules: Rules = DEFAULT_RULES,
        **choices: Any,
    ) -> None:
        self.numbering = Numbering(session, rules)
        self.inner = AsyncIdempotencyTransport(inner, rules=rules, **choices)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, again where that helps."""
        if not self.numbering.covers(request.method):
            return await self.inner.handle_async_request(request)
        numbered = await self._aside(self.begin, request, await request.aread())
        try:
            response = await self.inner.handle_async_request(request)
        except Exception as error:
            self.numbering.note(numbered, error)
            raise
        await self._aside(self.numbering.settle, numbered, self.answer(response))
        return response

    async def _aside(self, work: Any, *args: Any) -> Any:
        """Do what may wait, for a disk or for answers to come, where the loop does not wait with it."""
        if self.numbering.is_quick:
            return work(*args)
        import anyio.to_thread

        return await anyio.to_thread.run_sync(work, *args)

    async def aclose(self) -> None:
        """Close the inner transport."""
        await self.inner.aclose()
