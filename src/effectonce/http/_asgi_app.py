"""The app behind the ASGI boundary: in a task of its own, with a body to read; its answer is held for its record.

``Covered`` is a request whose key was claimed before the app runs, ``Claimable`` one whose handler may claim it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from .._asyncio import Watch
from .._attempt import CURRENT
from .._records import make
from ..errors import LeaseLost, UsageError
from ._asgi_body import Body, Message, Passing, Receive, close, message_of
from ._boundary import Boundary, Exchange, key_missing, natural_key, refused
from ._exchange import TOO_MUCH, TWO_STARTS, Answer, Problem, body_of, key_of, start_of
from ._names import checked_scope
from ._rules import Headers, Request, Rules
from ._wishes import WISH, Wish

Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]

GRACE_SECONDS = 0.01
"""How long an app has to fail after a response whose length it never said: nobody else can tell that it is complete."""
GRACE_TURNS = 32
"""And so many turns of the event loop, for which a busy one takes longer. Each BaseHTTPMiddleware needs three."""
HANDLE = "effectonce"
"""Where in an ASGI scope a handler that claims for itself finds the request: ``scope["effectonce"].claim(…)``."""


class Middleware(Protocol):
    """Whose requests these are."""

    app: App
    boundary: Boundary
    running: set[Covered]


class Covered:
    """One covered request that the app has to answer."""

    instead: Answer | None = None  # what counts more than anything the app says
    _said: Answer | None = None  # what it answers: at first the status and the headers
    _length: int | None = None  # of the body, as it said
    _pieces: list[bytes] | None = None
    _size = 0
    _later: asyncio.Handle | None = None  # runs while an answer waits for the app to end well
    _recorder: asyncio.Task[None] | None = None
    _recording = False  # what the app answers is known: nothing that happens now is its word
    _ended = False  # the answer is recorded, and sent or on its way
    _overruled = False  # and it is not the app's own
    _unsent: Exception | None = None  # why it could not be sent; not told to the app, for what it did is done
    _on_its_way: asyncio.Event | None = None
    _watch: Watch | None = None
    _heard: asyncio.Future[None]
    _task: asyncio.Task[None]

    def __init__(
        self,
        middleware: Middleware,
        rules: Rules,
        scope: Any,
        receive: Receive,
        send: Send,
        exchange: Exchange,
        body: Body,
    ) -> None:
        self._middleware, self._rules, self._scope = middleware, rules, scope
        self._receive, self._send = receive, send
        self.exchange = exchange
        self._body: Body | None = body  # what the app has still to read

    # The app, in a task of its own

    def start(self) -> asyncio.Future[None]:
        """Have the app answer, and tell when it has. It goes on when the server loses interest."""
        loop = asyncio.get_running_loop()
        self._heard = loop.create_future()
        self._task = loop.create_task(self._live())
        self._middleware.running.add(self)  # a loop holds on to nobody
        return self._heard

    async def _live(self) -> None:
        """Bring the app to its end, and what it did to its record."""
        heard = self._heard
        try:
            try:
                await self._begin()
                if self._watch is not None:
                    self._watch.end()
                if not self._ended and self._recorder is None:
                    await self._end_with_app()
            except BaseException as error:
                await self._end_badly(error)
            finally:
                if self._body is not None:
                    self._let_go()
                if self._recorder is not None:
                    await self._recorder
            if not heard.done():
                heard.set_result(None) if self._unsent is None else heard.set_exception(self._unsent)
        except asyncio.CancelledError as cancelled:
            heard.cancel(*cancelled.args)  # by which anyio knows its own
        except BaseException as error:
            if not heard.done():
                heard.set_exception(error)
            else:
                context = {"message": "A handler failed whose client had gone", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)
        finally:
            self._middleware.running.discard(self)

    def _begin(self) -> Awaitable[None]:
        """The app, as it is to run."""
        exchange, task = self.exchange, self._task
        self._watch = Watch(exchange.attempt, task.get_loop(), task)
        CURRENT.set(exchange.attempt)
        WISH.set(exchange.wish)
        scope = self._scope
        if "extensions" in scope:
            scope = without_extensions(scope)
        return self._middleware.app(scope, self._give_body, self._take_answer)

    async def _end_badly(self, error: BaseException) -> None:
        """The app raised, or what it said could not be recorded. Raises what the server has to know."""
        if self._watch is not None:
            error = self._watch.meaning(error)
            self._watch.end()
        if self._later is not None:
            self._later.cancel()
        if not self._overruled and (self._ended or not await self._failed(error)):
            raise error

    def _let_go(self) -> None:
        """Close what the app has not read."""
        close(self._body)

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
        if type(self._body) is bytes:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if self._body is not None:
            message, more = await message_of(self._body)
            self._body = self._body if more else None
            return message
        return await self._give_rest()

    async def _give_rest(self) -> Message:
        await self._wait_for_end()
        return await self._receive()

    async def _wait_for_end(self) -> None:
        if not self._ended:
            self._on_its_way = self._on_its_way or asyncio.Event()
            await self._on_its_way.wait()

    # What it sends

    async def _take_answer(self, message: Message) -> None:
        """Hold it until it is complete. What is neither start nor body belongs to extensions, and none were offered."""
        kind = message["type"]
        if self._ended:
            await self._pass_on(message)
            return
        if kind == "http.response.start":
            if self._said is not None:
                raise RuntimeError(TWO_STARTS)
            status = message["status"]
            headers, self._length, endless = start_of(status, message.get("headers", ()))
            self._said = make(Answer, (status, headers, None))
            if endless:
                await self._stream(b"", more=True)
            return
        if kind != "http.response.body":
            return
        piece, more = message.get("body", b""), message.get("more_body", False)
        if more or self._pieces is not None or self._length is None:
            await self._hold(piece, more)
            return
        if len(piece) != self._length or self._length > self._rules.max_response or self.instead is not None:
            await self._complete(piece)
            return
        begun = self._start()  # in one piece, as most are
        answer = make(Answer, (begun[0], begun[1], bytes(piece)))
        # Made before it is recorded: afterwards nothing is to keep those waiting who are recorded together.
        said = self.exchange.first(answer)
        await self._answer_with(await self.exchange.record(answer) or said)

    async def _hold(self, piece: bytes, more: bool) -> None:
        if self._later is not None or self._recorder is not None:
            raise RuntimeError(TOO_MUCH)
        if self._pieces is None:
            self._pieces = []
        self._pieces.append(bytes(piece))  # which the app may use again
        self._size += len(piece)
        if self._size > self._rules.max_response:
            await self._stream(self._join(), more)
        elif not more and self._length is not None:
            await self._complete(self._join())
        elif not more:
            loop = asyncio.get_running_loop()
            self._later = loop.call_later(GRACE_SECONDS, self._complete_apart, loop, GRACE_TURNS)

    def _complete_apart(self, loop: asyncio.AbstractEventLoop, turns: int) -> None:
        if turns:
            self._later = loop.call_soon(self._complete_apart, loop, turns - 1)
        else:
            self._later, self._recorder = None, loop.create_task(self._complete(self._join()))

    def _join(self) -> bytes:
        return b"".join(self._pieces or ())

    async def _complete(self, body: bytes) -> None:
        status, headers, _ = self._start()
        try:
            body = body_of(status, self._length, body)
        except RuntimeError:
            self._recording = False  # it is the app's word that this is wrong
            raise
        if len(body) > self._rules.max_response:
            await self._stream(body, more=False)
            return
        answer = make(Answer, (status, headers, bytes(body)))
        await self._answer_with(
            self.instead or await self.exchange.record(answer) or self.exchange.first(answer)
        )

    async def _stream(self, body: bytes, more: bool) -> None:
        """Record that it was done, without what it says, and let the response go as it comes."""
        said = self._start()
        instead = await self._record(said)
        if instead is None:
            await self._answer_with(self.exchange.first(said)._replace(body=body), more)
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
        return self.instead or await self.exchange.record(answer)

    async def _answer_with(self, answer: Answer | None, more: bool = False) -> None:
        self._ended = True
        if self._on_its_way is not None:
            self._on_its_way.set()
        try:
            if answer is not None:
                await send_answer(self._send, answer, more)
        except Exception as error:
            if more:  # who streams has to know that nobody hears it
                raise
            self._unsent = error


class Claimable(Covered):
    """A request that its handler may claim, once it knows who is calling. Until then it passes as it is."""

    claimed = False

    def __init__(
        self, middleware: Middleware, rules: Rules, scope: Any, receive: Receive, send: Send
    ) -> None:
        self._middleware, self._rules, self._scope = middleware, rules, scope
        self._receive, self._send, self._body = receive, send, b""
        self._passing = Passing(scope, rules, receive, keep=rules.key is not None)

    async def let_pass(self, lines: Sequence[bytes], length: int | None) -> None:
        """Let the app run, and its handler find this."""
        self._lines, self._declared = lines, length
        if not lines and self._rules.key is None:  # there is nothing to claim
            self._heard = asyncio.get_running_loop().create_future()
            await self._live()
            return self._heard.result()
        try:
            await self.start()
        except asyncio.CancelledError:
            if not self.claimed:
                self._task.cancel()
                await asyncio.wait([self._task])
            raise

    async def claim(self, scope: Any) -> bool:
        """Claim the key for the handler that runs: whether it has to go on. Else the answer is there already.

        Called by the handler, or by what stands before it, when the caller is known.
        """
        if self.claimed or self.instead is not None or self._ended:
            raise UsageError("This request was claimed already, or answered.")
        try:
            self.instead = await self._open(scope)
        except Problem as problem:
            self.instead = refused(problem, self._rules, self._lines)
        return self.instead is None

    async def _open(self, scope: Any) -> Answer | None:
        boundary, rules = self._middleware.boundary, self._rules
        key = key_of(self._lines, rules.strict)
        if key is None and rules.key is None:
            if rules.required:
                raise key_missing(rules)
            WISH.set(Wish())  # which nobody hears
            return None
        whose = checked_scope(scope)  # what is no key is refused before, and not echoed
        fingerprint = await self._passing.take_in_rest(self._declared)
        if key is None:
            key = natural_key(rules, request_of(self._scope), self._passing.whole())
        self.exchange = exchange = Exchange(
            boundary, rules, boundary.receiver.asyncio, key, whose, self._lines
        )
        answer = await exchange.open(fingerprint)
        if answer is None:
            self.claimed = True
            self._watch = Watch(exchange.attempt, self._task.get_loop(), self._task)
            CURRENT.set(exchange.attempt)
            WISH.set(exchange.wish)
        return answer

    def _begin(self) -> Awaitable[None]:
        scope = {**without_extensions(self._scope), HANDLE: self}
        return self._middleware.app(scope, self._give_body, self._take_answer)

    def _let_go(self) -> None:
        self._passing.close()

    async def _end_with_app(self) -> None:
        if self.claimed:
            await super()._end_with_app()
        else:
            if self._later is not None:  # what the app says of its end is not what is sent
                self._later.cancel()
            await self._answer_with(self.instead)

    async def _failed(self, error: BaseException) -> bool:
        if self.claimed:
            return await super()._failed(error)
        if self._recorder is None:  # which would answer as well
            await self._answer_with(self.instead)
        return self.instead is not None

    async def _give_body(self) -> Message:
        if self.claimed and self._passing.given:
            return await self._give_rest()
        message = await self._passing.give()
        # Who asked before the claim would cancel what has been claimed.
        if self.claimed and message["type"] == "http.disconnect":
            await self._wait_for_end()
        return message

    async def _take_answer(self, message: Message) -> None:
        if self.claimed or self.instead is not None:
            await super()._take_answer(message)
        else:
            self._ended = True
            if self._lines and message.get("status", 500) < 300 and not self._is_echoed(message):
                self._middleware.boundary.warn_of_unclaimed(self._scope["method"], seen_path(self._scope))
            await self._send(message)

    def _is_echoed(self, message: Message) -> bool:
        """Whether a boundary further inside, or of a service behind the app, has the key."""
        return any(name == self._rules.header_name for name, _ in message.get("headers", ()))


# -- Messages ------------------------------------------------------------------------------------------------------


def request_of(scope: Any) -> Request:
    """A request as scope and key functions see it."""
    query, path = scope["query_string"], seen_path(scope) if scope.get("root_path") else scope["path"]
    headers = Headers(scope["headers"])
    return make(Request, (scope["method"], path, query.decode("latin-1") if query else "", headers, scope))


def seen_path(scope: Any) -> str:
    """The path that the app sees, wherever it is mounted."""
    path: str = scope["path"]
    root = scope.get("root_path")
    return path[len(root) :] or "/" if root and f"{path}/".startswith(f"{root}/") else path


def without_extensions(scope: Any) -> Any:
    """A scope as the app may see it: what it sends past the body would go unseen."""
    offered = scope.get("extensions")
    if not offered:
        return scope
    kept = {name: value for name, value in offered.items() if not name.startswith("http.response.")}
    return {**scope, "extensions": kept}


async def send_answer(send: Send, answer: Answer, more: bool = False) -> None:
    """Send an answer; ``more`` of its body may follow."""
    status, headers, body = answer
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body or b"", "more_body": more})
