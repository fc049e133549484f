"""ASGI: ``IdempotencyMiddleware(app, receiver, scope=…)`` for Starlette, FastAPI, Litestar, Quart and every other app.

A covered request's body is read first, because it is part of what was asked. The app runs in a task of its own, so that
a client that goes away, and a server that cancels because of it, change nothing. What it answers is held until it is
recorded; then it is sent. A response that is too large to hold, or has no end, is recorded as done without its body
and then streamed. Every other request passes through untouched.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from tempfile import SpooledTemporaryFile
from typing import IO, Any

from .._attempt import CURRENT
from .._receiver import Receiver
from ..errors import UsageError
from ._boundary import (
    WISH,
    Boundary,
    Exchange,
    Request,
    Route,
    Rules,
    Scope,
    checked_scope,
    key_in,
    key_missing,
    natural_key,
)
from ._exchange import Answer, Hasher, Header, Problem

Message = Any
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]

IN_MEMORY = 1 << 20
"""A longer body waits on the disk for the app to read it."""
PIECE = 1 << 16
ENDLESS = b"text/event-stream"
HANDLE = "effectonce"
"""Where in an ASGI scope a handler that claims for itself finds the request: ``scope["effectonce"].claim(…)``."""


class IdempotencyMiddleware:
    """Every covered request of an app happens once.

    ``scope`` says whose keys these are: a function of the request (plain or async) that gives the caller's name, or
    ``PUBLIC``. ``routes`` and further words: see ``effectonce.http.Route`` and ``Rules``.
    """

    def __init__(
        self, app: App, receiver: Receiver, *, scope: Scope, routes: Iterable[Route] = (), **rules: Any
    ) -> None:
        if not isinstance(receiver, Receiver):
            raise UsageError(f"{receiver!r} is not a Receiver.")
        self.app = app
        self.boundary = Boundary(receiver, scope, routes, **rules)
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        rules = self.boundary.rules_for(scope["method"], scope["path"]) if scope["type"] == "http" else None
        if rules is None:
            await self.app(scope, receive, send)
            return
        try:
            request = _Covered(self, rules, scope, receive, send)
            key = key_in(rules, [value for name, value in scope["headers"] if name == rules.header_name])
            if key is not None or rules.key is not None:
                await request.run(key)
            elif rules.claim == "handler":
                await request.pass_through()
            else:
                await self.app(scope, receive, send)
        except Problem as problem:
            await _send(send, problem.answer(rules.documentation))
        except _Gone:
            return

    async def shielded(self, work: Awaitable[None]) -> None:
        """Await something that goes on when the caller is cancelled."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await asyncio.shield(task)


class _Gone(Exception):
    """The client left before its request was complete: nothing was asked."""


class _Covered:
    """One covered request."""

    exchange: Exchange | None = None
    instead: Answer | None = None
    """What a handler that claims for itself found: it is sent, whatever the app says."""

    def __init__(
        self,
        middleware: IdempotencyMiddleware,
        rules: Rules,
        scope: MutableMapping[str, Any],
        receive: Receive,
        send: Send,
    ) -> None:
        self._middleware, self._rules, self._scope = middleware, rules, scope
        self._receive, self._send = receive, send
        self._body: bytes | IO[bytes] = b""
        self._body_given = False
        self._start: Message | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        self._key: str | None = None
        self._ended = False  # the response is recorded, and sent or on its way
        self._overruled = False  # and it is not the app's own
        self._on_its_way: asyncio.Event | None = None

    async def pass_through(self) -> None:
        """Let the app answer a request without a key, unless its handler says that it needs one."""
        await self._middleware.app({**self._scope, HANDLE: self}, self._receive, self._take_answer)

    async def run(self, key: str | None) -> None:
        """Answer it, by running the app or without."""
        self._request = _request(self._scope)
        self._key = key
        by_handler = self._rules.claim == "handler"
        scope = "" if by_handler else await self._whose()
        self._fingerprint = await self._take_in_body()
        if by_handler:
            self._scope = {**self._scope, HANDLE: self}
        else:
            answer = await self._open(scope)
            if answer is not None:
                await _send(self._send, answer)
                return
        await self._middleware.shielded(self._handle())

    async def claim(self, scope: str) -> bool:
        """Claim the key for the handler that runs: whether it has to go on. Else the answer is there already.

        For rules with ``claim="handler"``: called by the handler, or what stands before it, when the caller is known.
        """
        if self.exchange is not None or self._ended:
            raise UsageError("This request was claimed already, or answered.")
        try:
            self.instead = await self._open(checked_scope(scope))
        except Problem as problem:
            self.instead = problem.answer(self._rules.documentation)
        if self.instead is not None:
            return False
        self._enter()
        return True

    async def _whose(self) -> str:
        whose = self._middleware.boundary.scope_of(self._request)
        return checked_scope(await whose if inspect.isawaitable(whose) else whose)

    async def _open(self, scope: str) -> Answer | None:
        boundary, rules, key = self._middleware.boundary, self._rules, self._key
        if key is None and rules.key is None:
            raise key_missing(rules)
        if key is None:
            key = natural_key(rules, self._request, await self._whole_body())
        self.exchange = Exchange(boundary, rules, boundary.receiver.asyncio, key, scope)
        return await self.exchange.open(self._fingerprint)

    # The request's body

    async def _take_in_body(self) -> bytes:
        """Read the body to its end and say what was asked."""
        scope, rules = self._scope, self._rules
        path = scope.get("raw_path") or scope["path"].encode()
        hasher = Hasher(scope["method"], path.partition(b"?")[0], scope["query_string"], rules.fingerprint)
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        if declared.isdigit() and int(declared) > rules.max_request:
            raise _too_large(rules)
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            body: bytes = message.get("body", b"")
            if len(body) > rules.max_request:
                raise _too_large(rules)
            self._body = body
            hasher.update(body)
            return hasher.digest()
        try:
            async with asyncio.timeout(rules.patience):
                await self._take_in_pieces(message, hasher)
        except TimeoutError:
            raise Problem("request-timeout", "Send the same request with the same key again.") from None
        return hasher.digest()

    async def _take_in_pieces(self, message: Message, hasher: Hasher) -> None:
        size, spool = 0, SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 - closed with the request
        self._body = spool
        while True:
            if message["type"] != "http.request":
                raise _Gone
            piece: bytes = message.get("body", b"")
            size += len(piece)
            if size > self._rules.max_request:
                raise _too_large(self._rules)
            hasher.update(piece)
            if size > IN_MEMORY:
                await asyncio.to_thread(spool.write, piece)
            else:
                spool.write(piece)
            if not message.get("more_body", False):
                break
            message = await self._receive()
        spool.seek(0)

    async def _whole_body(self) -> bytes:
        if isinstance(self._body, bytes):
            return self._body
        body = await asyncio.to_thread(self._body.read)
        self._body.seek(0)
        return body

    async def _give_body(self) -> Message:
        """What the app receives: the body, then nothing until the answer is on its way, then what really comes."""
        if not self._body_given:
            if isinstance(self._body, bytes):
                self._body_given = True
                return {"type": "http.request", "body": self._body, "more_body": False}
            piece = await asyncio.to_thread(self._body.read, PIECE)
            self._body_given = len(piece) < PIECE
            return {"type": "http.request", "body": piece, "more_body": not self._body_given}
        if not self._ended:
            self._on_its_way = self._on_its_way or asyncio.Event()
            await self._on_its_way.wait()
        return await self._receive()

    # The handler and its answer

    def _enter(self) -> None:
        assert self.exchange is not None
        CURRENT.set(self.exchange.attempt)
        WISH.set(self.exchange.wish)

    async def _handle(self) -> None:
        app, exchange = self._middleware.app, self.exchange
        scope = {**self._scope, "extensions": {}}  # what sends past the body would go unseen
        running = app(scope, self._give_body, self._take_answer)
        if exchange is not None:
            self._enter()
            running = exchange.colour.attend(exchange.attempt, running)
        try:
            await running
            if not self._ended:
                await self._end_early()
        except BaseException as error:
            if self._ended or not await self._failed(error):
                raise
        finally:
            if not isinstance(self._body, bytes):
                self._body.close()

    async def _failed(self, error: BaseException) -> bool:
        """The app raised: whether there is an answer that counts more than its error."""
        answer = self.instead
        if answer is None and self.exchange is not None:
            answer = await self.exchange.fail(error)
        await self._end_with(answer)
        return answer is not None and self._rules.on_server_error != "remember"

    async def _take_answer(self, message: Message) -> None:
        """What the app sends: held until it is complete."""
        if self._overruled:
            return
        if self._ended or (self.exchange is None and self.instead is None):
            self._ended = True
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._start = message
            if any(
                name.lower() == b"content-type" and value.lower().startswith(ENDLESS)
                for name, value in _headers(message)
            ):
                await self._stream()
        elif message["type"] == "http.response.body":
            piece = message.get("body", b"")
            self._pieces.append(piece)
            self._size += len(piece)
            more = message.get("more_body", False)
            if self._size > self._rules.max_response:
                await self._stream(more)
            elif not more:
                await self._end_with(await self._recorded(self._answer(b"".join(self._pieces))))
        else:
            await self._send(message)

    async def _stream(self, more: bool = True) -> None:
        """Record that it was done, without what it says, and let the response go as it comes."""
        answer = await self._recorded(self._answer(None))
        if answer.body is None:
            await self._end_with(answer._replace(body=b"".join(self._pieces)), more)
        else:  # another attempt's answer counts, or a problem
            self._overruled = True
            await self._end_with(answer)

    async def _end_early(self) -> None:
        """The app is done without a complete response."""
        if self._start is None:
            raise RuntimeError("The app returned without a response.")
        await self._stream(more=False)

    async def _recorded(self, answer: Answer) -> Answer:
        """What is to be sent for what the app answers."""
        if self.instead is not None:
            return self.instead
        return answer if self.exchange is None else await self.exchange.end(answer)

    async def _end_with(self, answer: Answer | None, more: bool = False) -> None:
        self._ended = True
        if self._on_its_way is not None:
            self._on_its_way.set()
        if answer is not None:
            await _send(self._send, answer, more)

    def _answer(self, body: bytes | None) -> Answer:
        if self._start is None:
            raise RuntimeError("The app sent a body before the start of a response.")
        return Answer(self._start["status"], _headers(self._start), body)


def _headers(start: Message) -> tuple[Header, ...]:
    return tuple((bytes(name), bytes(value)) for name, value in start.get("headers", ()))


def _too_large(rules: Rules) -> Problem:
    return Problem("request-too-large", f"A body may have {rules.max_request} bytes.")


def _request(scope: MutableMapping[str, Any]) -> Request:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    return Request(scope["method"], scope["path"], scope["query_string"].decode("latin-1"), headers, scope)


async def _send(send: Send, answer: Answer, more: bool = False) -> None:
    await send({"type": "http.response.start", "status": answer.status, "headers": list(answer.headers)})
    await send({"type": "http.response.body", "body": answer.body or b"", "more_body": more})
