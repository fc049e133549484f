"""ASGI: ``IdempotencyMiddleware(app, receiver, scope=…)`` for Starlette, FastAPI, Litestar, Quart and every other app.

A covered request's body is read first, because it is part of what was asked. The app runs in a task of its own, so that
a client that goes away, and a server that cancels because of it, change nothing. What it answers is held until it is
recorded; then it is sent. A response that is too large to hold, or has no end, is recorded as done without its body
and then streamed. Every other request passes through untouched.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Unpack

from .._attempt import CURRENT
from .._receiver import Receiver
from ..errors import LeaseLost, UsageError
from ._asgi_body import Body, Gone, Message, Passing, Receive, close, message_of, take_in, whole
from ._boundary import (
    WISH,
    Boundary,
    Exchange,
    Headers,
    Request,
    Route,
    Rules,
    RuleWords,
    Scope,
    checked_scope,
    key_in,
    key_missing,
    natural_key,
)
from ._exchange import PUBLIC, Answer, Problem, key_of, outlook, sound

Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]

GRACE_SECONDS = 0.01
"""How long an app has to fail after a response whose length it never said: nobody else can tell that it is complete."""
HANDLE = "effectonce"
"""Where in an ASGI scope a handler that claims for itself finds the request: ``scope["effectonce"].claim(…)``."""


class IdempotencyMiddleware:
    """Every covered request of an app happens once.

    ``scope`` says whose keys these are: a function of the request (plain or async) that gives the caller's name, or
    ``PUBLIC``. ``routes`` and further words: see ``effectonce.http.Route`` and ``Rules``.
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
        if not isinstance(receiver, Receiver):
            raise UsageError(f"{receiver!r} is not a Receiver.")
        self.app = app
        self.boundary = Boundary(receiver, scope, routes, **rules)
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            rules = self.boundary.rules_for(scope["method"], scope["path"])
            if rules is not None:
                await self._cover(rules, scope, receive, send)
                return
        await self.app(scope, receive, send)

    async def _cover(self, rules: Rules, scope: Any, receive: Receive, send: Send) -> None:
        header = rules.header_name
        lines = [value for name, value in scope["headers"] if name == header]
        try:
            if rules.claim == "handler":
                await _Claimable(self, rules, scope, receive, send).let_pass(lines)
                return
            key = key_in(rules, lines)
            if key is not None or rules.key is not None:
                await _Covered(self, rules, scope, receive, send).run(key)
            else:
                await self.app(scope, receive, send)
        except Problem as problem:
            await _send(send, problem.answer(rules.documentation))
        except Gone:
            return

    async def shielded(self, work: Coroutine[Any, Any, None], needed: Callable[[], bool]) -> None:
        """Await something that goes on when the caller is cancelled, if it is needed then."""
        loop = asyncio.get_running_loop()
        heard: asyncio.Future[None] = loop.create_future()
        task = loop.create_task(work)
        self._running.add(task)  # a loop holds on to nobody

        def end(task: asyncio.Task[None]) -> None:
            self._running.discard(task)
            if not heard.done():
                heard.set_result(None)
            elif not task.cancelled() and (error := task.exception()) is not None:
                context = {"message": "A handler failed whose client had gone", "exception": error}
                loop.call_exception_handler(context)

        task.add_done_callback(end)
        try:
            await heard
        except asyncio.CancelledError:
            if not needed():
                task.cancel()
                await asyncio.wait([task])
            raise
        task.result()


class _Covered:
    """One covered request, claimed before the app runs."""

    exchange: Exchange
    _body: Body | None = None  # what the app has still to read
    _said: Answer | None = None  # what it answers: at first the status and the headers
    _length: int | None = None  # of the body, as it said
    _pieces: list[bytes] | None = None
    _size = 0
    _later: asyncio.TimerHandle | None = None  # runs while an answer waits for the app to end well
    _recorder: asyncio.Task[None] | None = None
    _recording = False  # what the app answers is known: nothing that happens now is its word
    _ended = False  # the answer is recorded, and sent or on its way
    _overruled = False  # and it is not the app's own
    _on_its_way: asyncio.Event | None = None

    def __init__(
        self, middleware: IdempotencyMiddleware, rules: Rules, scope: Any, receive: Receive, send: Send
    ) -> None:
        self._middleware, self._rules, self._scope = middleware, rules, scope
        self._receive, self._send = receive, send

    async def run(self, key: str | None) -> None:
        """Answer it, by running the app or without."""
        boundary, rules = self._middleware.boundary, self._rules
        whose = await self._whose() if callable(boundary.scope) else PUBLIC
        fingerprint, body = await take_in(self._scope, rules, self._receive)
        self._body = body
        try:
            if key is None:
                key = natural_key(rules, _request(self._scope), await whole(body))
            self.exchange = exchange = Exchange(boundary, rules, boundary.receiver.asyncio, key, whose)
            answer = await exchange.open(fingerprint)
        except BaseException:
            close(body)
            raise
        if answer is None:
            await self._middleware.shielded(self._handle(), self._needed)
        else:
            close(body)
            await _send(self._send, answer)

    async def _whose(self) -> str:
        whose = self._middleware.boundary.scope_of(_request(self._scope))
        if type(whose) is not str and inspect.isawaitable(whose):
            whose = await whose
        return checked_scope(whose)

    def _needed(self) -> bool:
        """Whether the app has to run on when the server has lost interest."""
        return True

    # The app

    async def _handle(self) -> None:
        exchange = self.exchange
        self._enter(exchange)
        app = self._app(_without_extensions(self._scope))
        await self._end(exchange.colour.attend(exchange.attempt, app))

    def _app(self, scope: Any) -> Awaitable[None]:
        return self._middleware.app(scope, self._give_body, self._take_answer)

    def _enter(self, exchange: Exchange) -> None:
        CURRENT.set(exchange.attempt)
        WISH.set(exchange.wish)

    async def _end(self, running: Awaitable[None]) -> None:
        """Bring the app to its end, and what it did to its record."""
        try:
            await running
            if not self._ended and self._recorder is None:
                await self._end_with_app()
        except BaseException as error:
            if self._later is not None:
                self._later.cancel()
            if self._overruled:
                return
            if self._ended or not await self._failed(error):
                raise
        finally:
            close(self._body)
            if self._recorder is not None:
                await self._recorder

    async def _end_with_app(self) -> None:
        """The app has returned, and its answer is not recorded yet."""
        if self._later is not None:
            self._later.cancel()
            await self._complete(self._join())
            return
        if self._said is not None and not self._recording:  # what it did is done, what it said is lost
            await self._record(self._start())
        raise RuntimeError("The app returned without a complete response.")

    async def _failed(self, error: BaseException) -> bool:
        """The app raised: whether that is the boundary's own doing, and answered."""
        if self._recording:  # not the app's word: its claim stays, and its lease ends it
            self.exchange.abandon()
            return False
        answer = await self.exchange.fail(error)
        await self._answer_with(answer)
        return answer is not None and isinstance(error, LeaseLost)

    # What it receives

    async def _give_body(self) -> Message:
        """The body, then nothing until the answer is on its way, then what really comes."""
        if self._body is not None:
            message, more = await message_of(self._body)
            self._body = self._body if more else None
            return message
        return await self._give_rest()

    async def _give_rest(self) -> Message:
        if not self._ended:
            self._on_its_way = self._on_its_way or asyncio.Event()
            await self._on_its_way.wait()
        return await self._receive()

    # What it sends

    async def _take_answer(self, message: Message) -> None:
        """Hold it until it is complete. What is neither start nor body belongs to extensions, and none were offered."""
        kind = message["type"]
        if self._ended:
            await self._pass_on(message)
        elif kind == "http.response.start":
            headers = sound(message.get("headers", ()))
            self._said = Answer(message["status"], headers, None)
            self._length, endless = outlook(message["status"], headers)
            if endless:
                await self._stream(b"", more=True)
        elif kind == "http.response.body":
            piece, more = message.get("body", b""), message.get("more_body", False)
            if self._pieces is None and self._length is not None and not more:
                await self._complete(piece)
            else:
                await self._hold(piece, more)

    async def _hold(self, piece: bytes, more: bool) -> None:
        if self._pieces is None:
            self._pieces = []
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > self._rules.max_response:
            await self._stream(self._join(), more)
        elif not more and self._length is not None:
            await self._complete(self._join())
        elif not more:
            loop = asyncio.get_running_loop()
            self._later = loop.call_later(GRACE_SECONDS, self._complete_apart, loop)

    def _complete_apart(self, loop: asyncio.AbstractEventLoop) -> None:
        self._later, self._recorder = None, loop.create_task(self._complete(self._join()))

    def _join(self) -> bytes:
        return b"".join(self._pieces or ())

    async def _complete(self, body: bytes) -> None:
        status, headers, _ = self._start()
        if self._length is not None and len(body) != self._length:
            self._recording = False  # it is the app's word that this is wrong
            raise RuntimeError(f"The app said that it answers {self._length} bytes, and sent {len(body)}.")
        if len(body) > self._rules.max_response:
            await self._stream(body, more=False)
            return
        answer = Answer(status, headers, bytes(body))
        await self._answer_with(await self._record(answer) or self._marked(answer))

    async def _stream(self, body: bytes, more: bool) -> None:
        """Record that it was done, without what it says, and let the response go as it comes."""
        said = self._start()
        instead = await self._record(said)
        if instead is None:
            await self._answer_with(self._marked(said)._replace(body=body), more)
        else:
            self._overruled = True
            await self._answer_with(instead)

    async def _pass_on(self, message: Message) -> None:
        if not self._overruled:
            await self._send(message)
        elif message.get("more_body", False):  # a stream that nobody hears would go on forever
            raise ConnectionAbortedError("Another answer counts, and has been sent.")

    def _start(self) -> Answer:
        if self._said is None:
            raise RuntimeError("The app sent a body before the start of a response.")
        self._recording = True
        return self._said

    async def _record(self, answer: Answer) -> Answer | None:
        return await self.exchange.record(answer)

    def _marked(self, answer: Answer) -> Answer:
        return self.exchange.first(answer)

    async def _answer_with(self, answer: Answer | None, more: bool = False) -> None:
        self._ended = True
        if self._on_its_way is not None:
            self._on_its_way.set()
        if answer is not None:
            await _send(self._send, answer, more)


class _Claimable(_Covered):
    """A request that its handler may claim, once it knows who is calling. Until then it passes as it is."""

    claimed: Exchange | None = None
    instead: Answer | None = None
    """What the handler found when it claimed: it is sent, whatever the app says."""

    async def let_pass(self, lines: list[bytes]) -> None:
        """Let the app run, and its handler find this."""
        self._lines = lines
        self._passing = Passing(self._scope, self._rules, self._receive, keep=self._rules.key is not None)
        if not lines and self._rules.key is None:
            await self._handle()  # there is nothing to claim
        else:
            await self._middleware.shielded(self._handle(), self._needed)

    async def claim(self, scope: Any) -> bool:
        """Claim the key for the handler that runs: whether it has to go on. Else the answer is there already.

        Called by the handler, or by what stands before it, when the caller is known.
        """
        if self.claimed is not None or self.instead is not None or self._ended:
            raise UsageError("This request was claimed already, or answered.")
        try:
            self.instead = await self._open(checked_scope(scope))
        except Problem as problem:
            self.instead = problem.answer(self._rules.documentation)
        return self.instead is None

    async def _open(self, whose: str) -> Answer | None:
        boundary, rules = self._middleware.boundary, self._rules
        key = key_of(self._lines, strict=rules.strict)
        if key is None and rules.key is None:
            if rules.required:
                raise key_missing(rules)
            return None
        fingerprint = await self._passing.take_in_rest()
        if key is None:
            key = natural_key(rules, _request(self._scope), self._passing.whole())
        exchange = Exchange(boundary, rules, boundary.receiver.asyncio, key, whose)
        answer = await exchange.open(fingerprint)
        if answer is None:
            self.exchange = self.claimed = exchange
            self._enter(exchange)
        return answer

    def _needed(self) -> bool:
        return self.claimed is not None

    async def _handle(self) -> None:
        try:
            await self._end(self._app({**_without_extensions(self._scope), HANDLE: self}))
        finally:
            self._passing.close()

    async def _end_with_app(self) -> None:
        if self.claimed is not None:
            await super()._end_with_app()
        else:
            await self._answer_with(self.instead)

    async def _failed(self, error: BaseException) -> bool:
        if self.claimed is not None:
            return await super()._failed(error)
        await self._answer_with(self.instead)
        return self.instead is not None

    async def _give_body(self) -> Message:
        if self.claimed is None or not self._passing.given:
            return await self._passing.give()
        return await self._give_rest()

    async def _take_answer(self, message: Message) -> None:
        if self.claimed is None and self.instead is None:
            self._ended = True
            await self._send(message)
        else:
            await super()._take_answer(message)

    async def _record(self, answer: Answer) -> Answer | None:
        return self.instead or await super()._record(answer)


# -- Messages ------------------------------------------------------------------------------------------------------


def _request(scope: Any) -> Request:
    query = scope["query_string"].decode("latin-1")
    return Request(scope["method"], scope["path"], query, Headers(scope["headers"]), scope)


def _without_extensions(scope: Any) -> Any:
    """A scope as the app may see it: what it sends past the body would go unseen."""
    offered = scope.get("extensions")
    if not offered:
        return scope
    kept = {name: value for name, value in offered.items() if not name.startswith("http.response.")}
    return {**scope, "extensions": kept}


async def _send(send: Send, answer: Answer, more: bool = False) -> None:
    status, headers, body = answer
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body or b"", "more_body": more})
