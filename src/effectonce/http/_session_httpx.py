"""A session's transports for httpx: those of ``client``, with a number for each request."""

from __future__ import annotations

from typing import Any

import httpx

from ..sessions import ClientSession, Request
from ._httpx import AsyncIdempotencyTransport, AwaitedComing, BlockingComing, IdempotencyTransport
from ._numbering import Numbering
from ._retrying import Answer, Rules, is_redirect
from .client import DEFAULT_RULES, NAME, NAME_EXTENSION

WAITING = 8
"""Threads of a transport on an event loop that wait for numbers; more requests wait on the loop."""


class _Numbered:
    """What both colours share."""

    numbering: Numbering

    def begin(self, request: httpx.Request, body: bytes) -> Request:
        """Give a request its number."""
        name = request.extensions.get(NAME_EXTENSION, NAME.get())
        # Names belong to the session's journal; what sends the request need not know them.
        request.extensions = {**request.extensions, NAME_EXTENSION: None}
        return self.numbering.begin(request.method, str(request.url), request.headers, body, name)

    def answer(self, response: httpx.Response) -> Answer:
        """What is known of a response."""
        stream = response.stream
        body = b"".join(stream) if isinstance(stream, httpx.ByteStream) else b""
        return Answer(response.status_code, response.headers, body)

    def is_here(self, response: httpx.Response, said: Answer) -> bool:
        """Whether all of an answer is here. Where a redirection leads to is all that it says."""
        return isinstance(response.stream, httpx.ByteStream) or is_redirect(said)


class SessionTransport(_Numbered, IdempotencyTransport):
    """Numbers the requests of an ``httpx.Client`` and sends them again until there is an answer.

    Takes a ``ClientSession``, and what ``IdempotencyTransport`` takes but a journal, which is the session's.
    """

    def __init__(
        self,
        session: ClientSession,
        inner: httpx.BaseTransport | None = None,
        *,
        rules: Rules = DEFAULT_RULES,
        **choices: Any,
    ) -> None:
        super().__init__(inner, rules=rules, **choices)
        self.numbering = Numbering(session, rules)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, again where that helps."""
        if not self.numbering.covers(request.method):
            return super().handle_request(request)
        numbered = self.begin(request, request.read())
        with self.numbering.noted(numbered):
            response = super().handle_request(request)
        said = self.answer(response)

        def settle() -> None:
            self.numbering.settle(numbered, said, str(request.url), request.headers)

        if self.is_here(response, said):
            settle()
        else:
            response.stream = BlockingComing(response.stream, lambda: self.numbering.noted(numbered), settle)
        return response


class AsyncSessionTransport(_Numbered, AsyncIdempotencyTransport):
    """``SessionTransport`` for an ``httpx.AsyncClient``. It never blocks the loop."""

    def __init__(
        self, session: ClientSession, inner: httpx.AsyncBaseTransport | None = None, **choices: Any
    ) -> None:
        super().__init__(inner, **choices)
        self.numbering = Numbering(session, choices.get("rules", DEFAULT_RULES))
        self._waiting: Any = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, again where that helps."""
        if not self.numbering.covers(request.method):
            return await super().handle_async_request(request)
        body = await request.aread()
        if self.numbering.is_quick:
            numbered = self.begin(request, body)
        else:
            numbered = await self._aside(self._room(), self.begin, request, body)
        with self.numbering.noted(numbered):
            response = await super().handle_async_request(request)
        said = self.answer(response)

        async def settle() -> None:
            what = (numbered, said, str(request.url), request.headers)
            if self.numbering.is_noted:
                await self._aside(None, self.numbering.settle, *what)
            else:
                self.numbering.settle(*what)

        if self.is_here(response, said):
            await settle()
        else:
            response.stream = AwaitedComing(response.stream, lambda: self.numbering.noted(numbered), settle)
        return response

    def _room(self) -> Any:
        """Threads for those who wait for a number, apart from others': an answer must find one, to make room."""
        import anyio

        if self._waiting is None:
            self._waiting = anyio.CapacityLimiter(WAITING)
        return self._waiting

    async def _aside(self, limiter: Any, work: Any, *args: Any) -> Any:
        """Do what may wait, for a disk or for answers to come, where the loop does not wait with it."""
        import anyio.to_thread

        return await anyio.to_thread.run_sync(work, *args, limiter=limiter)
