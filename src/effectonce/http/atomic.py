"""HTTP in atomic mode: the request's record is in the transaction of what its handler does. For ASGI and WSGI.

The boundary begins a transaction, by a function that you give, and claims the request's key in it. The app runs inside,
and finds the connection by ``connection()``. What it answers is recorded, the transaction commits, and only then does
the client get the first byte: it was told nothing that is not so. An answer of 5xx, or an exception, undoes what the
handler did. Whatever the engine asks to be run again (a deadlock, a serialization failure, a COMMIT without a reply) is
run again, the app with it.

An answer is held until the commit. So nothing streams here: a stream of events is refused, and what its handler did is
undone; an answer that is larger than ``max_response`` is recorded as done without its body. What an app does after its
answer (background tasks) is part of the transaction too.
"""

from __future__ import annotations

import asyncio
import inspect
import io
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any, Unpack, cast

from .._answers import call_of
from .._attempt import Attempt
from .._blocking import run
from .._receiver import Receiver
from ..errors import InProgress, UsageError
from ..transactions import aretrying, is_retryable, retrying
from ..transactions._flow import AtomicAttempt, ended_meanwhile
from ..transactions._retrying import may_help
from ..transactions.base import SavepointGone
from . import _asgi_body as asgi_body
from . import wsgi
from ._asgi_app import App, Send, request_of, seen_path, send_answer, without_extensions
from ._boundary import Boundary, Exchange, claimed_here, key_in, natural_key, refused
from ._exchange import (
    ANSWER,
    PUBLIC,
    TOO_MUCH,
    TWO_STARTS,
    Answer,
    Problem,
    Start,
    body_of,
    pairs_of,
    start_of,
)
from ._intake import whole
from ._names import checked_scope
from ._quota import Share
from ._rules import Route, Rules, RuleWords, Scope
from ._wishes import Wish, unheard

__all__ = ["AtomicMiddleware", "AtomicWSGIMiddleware", "connection"]

CONNECTION: ContextVar[Any] = ContextVar("effectonce_connection")


def connection() -> Any:
    """The connection that a handler behind the atomic boundary shares its transaction with."""
    try:
        return CONNECTION.get()
    except LookupError:
        raise UsageError(
            "There is no transaction here: the request is not covered, has no key, or no atomic boundary is installed."
        ) from None


class AtomicExchange(Exchange):
    """One request whose record is in a transaction."""

    def __init__(
        self,
        boundary: Boundary,
        rules: Rules,
        on: Receiver,
        key: str,
        scope: str,
        share: Share | None = None,
        *,
        lines: Sequence[bytes],
    ) -> None:
        colour = on.asyncio if _awaits(on) else on.blocking
        super().__init__(boundary, rules, colour, key, scope, lines)
        self.flow = on.flow
        self._share = share or self._share

    async def open(self, fingerprint: bytes) -> Answer | None:
        """Claim the key: the answer to give at once, or None if the handler has to run."""
        terms, may_create = self.rules.terms, self._share.take()
        if not may_create:
            terms = terms.but(late="reject", dead_letter=None)
        name = self.boundary.prefix_of(self.scope) + self.key
        self.call = call_of(name, fingerprint, terms, ANSWER, may_create)
        try:
            opened = await self.flow.open(self.colour, self.call)
        except BaseException:
            self._share.give_back()
            raise
        if not isinstance(opened, Attempt):
            self._share.give_back()
            return self._refusal(opened)
        self.attempt, self.wish = opened, Wish()
        return None

    async def end(self, answer: Answer) -> Answer:
        """Record what the handler answered, without its body if that is too large to keep."""
        if len(answer.body or b"") > self.rules.max_response:
            self.wish.store = False
        return await super().end(answer)

    async def record(self, answer: Answer) -> Answer | None:
        """Record what the handler answered. What led to a 5xx is undone, also when it is remembered."""
        if answer.status >= 500 and self._failure(answer.status) is None:
            await self._undo()
        return await super().record(answer)

    async def fail(self, error: BaseException) -> Answer | None:
        """Undo what the handler did, and record that it raised; unless all of it is to be run again."""
        if isinstance(error, InProgress) or is_retryable(error):
            await self.flow.fail(self.colour, self.call, self.attempt, error)
            return None
        return await super().fail(error)

    async def _undo(self) -> None:
        attempt = cast("AtomicAttempt", self.attempt)
        if attempt.savepoint is not None:
            name, attempt.savepoint = attempt.savepoint, None
            try:
                await cast("Any", self.colour.store).adapter.roll_back_to(name)
            except SavepointGone as gone:
                raise ended_meanwhile(self.call.key) from gone


class AtomicMiddleware:
    """Every covered request of an ASGI app happens once, in a transaction that ``begin()`` begins.

    ``begin`` gives an async context manager with a connection, which commits when it is left: ``pool.connection`` of
    psycopg, ``engine.begin`` of SQLAlchemy. Further words: see ``effectonce.http.asgi.IdempotencyMiddleware``.
    """

    def __init__(
        self,
        app: App,
        receiver: Receiver,
        begin: Callable[[], AbstractAsyncContextManager[Any]],
        *,
        scope: Scope,
        routes: Iterable[Route] = (),
        **rules: Unpack[RuleWords],
    ) -> None:
        self.app, self.begin = app, begin
        self.boundary = claimed_here(Boundary(receiver, scope, routes, **rules))

    async def __call__(self, scope: Any, receive: asgi_body.Receive, send: Send) -> None:
        rules = None
        if scope["type"] == "http":
            rules = self.boundary.rules_for(scope["method"], seen_path(scope))
        if rules is None:
            await self.app(scope, receive, send)
            return
        lines = [value for name, value in scope["headers"] if name == rules.header_name]
        try:
            key = key_in(rules, lines)
            if key is None and rules.key is None:
                with unheard():
                    await self.app(scope, receive, send)
                return
            answer = await self._answer(rules, scope, receive, key, lines)
        except Problem as problem:
            answer = refused(problem, rules, lines)
        except asgi_body.Gone:
            return
        await send_answer(send, answer)

    async def _answer(
        self, rules: Rules, scope: Any, receive: asgi_body.Receive, key: str | None, lines: Sequence[bytes]
    ) -> Answer:
        whose = self.boundary.scope_of(request_of(scope)) if callable(self.boundary.scope) else PUBLIC
        whose = checked_scope(await whose if inspect.isawaitable(whose) else whose)
        length = asgi_body.declared_length(scope)
        asgi_body.check_size(length or 0, rules)
        fingerprint, taken = await asgi_body.take_in(scope, rules, receive, length, *asgi_body.begin(receive))
        try:
            body = await asgi_body.whole(taken)
        finally:
            asgi_body.close(taken)
        name = key if key is not None else natural_key(rules, request_of(scope), body)
        share = Share(self.boundary.quota, whose, rules.max_new_keys)

        async def transaction(on: Any) -> Answer:
            receiver = self.boundary.receiver.on(on)
            exchange = AtomicExchange(self.boundary, rules, receiver, name, whose, share, lines=lines)
            known = await exchange.open(fingerprint)
            if known is not None:
                return known
            token = CONNECTION.set(on)
            try:
                with exchange.at_work():
                    said = await _collected(self.app, scope, body)
            except BaseException as error:
                answer = await exchange.fail(error)
                if answer is None:
                    raise
                return answer
            finally:
                CONNECTION.reset(token)
            return await exchange.end(said)

        try:
            return await aretrying(self.begin, transaction)
        except Exception as error:
            if may_help(error):
                raise _unavailable(self.boundary, error) from error
            raise


async def _collected(app: App, scope: Any, body: bytes) -> Answer:
    """What an app answers, all of it. It may be asked again, so it gets a scope that it may change."""
    given, is_complete, status = False, False, 0
    start: Start | None = None
    pieces: list[bytes] = []

    async def receive() -> Any:
        nonlocal given
        if given:  # nobody has gone, and there is nothing more to say
            await asyncio.Event().wait()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal is_complete, start, status
        if message["type"] == "http.response.start":
            if start is not None:
                raise RuntimeError(TWO_STARTS)
            status = message["status"]
            start = start_of(status, message.get("headers", ()))
            if start.endless:
                raise _endless()
        elif message["type"] == "http.response.body":
            if is_complete:
                raise RuntimeError(TOO_MUCH)
            pieces.append(bytes(message.get("body", b"")))
            is_complete = not message.get("more_body", False)

    await app({**without_extensions(scope)}, receive, send)
    if start is None or not is_complete:
        raise RuntimeError("The app returned without a complete response.")
    return Answer(status, start.headers, body_of(status, start.length, b"".join(pieces)))


class AtomicWSGIMiddleware:
    """The same for a WSGI app. Django has ``effectonce.http.django_atomic``: it closes connections around its apps."""

    def __init__(
        self,
        app: wsgi.App,
        receiver: Receiver,
        begin: Callable[[], AbstractContextManager[Any]],
        *,
        scope: Scope,
        routes: Iterable[Route] = (),
        **rules: Unpack[RuleWords],
    ) -> None:
        self.app, self.begin = app, begin
        self.boundary = claimed_here(Boundary(receiver, scope, routes, **rules))

    def __call__(self, environ: wsgi.Environ, start_response: wsgi.StartResponse) -> Iterable[bytes]:
        rules = self.boundary.rules_for(wsgi.method_of(environ), wsgi.path_of(environ))
        if rules is None:
            return self.app(environ, start_response)
        lines = wsgi.lines_of(environ, rules.header)
        try:
            key = key_in(rules, lines)
            if key is None and rules.key is None:
                with unheard():
                    return self.app(environ, start_response)
            answer = self._answer(rules, environ, key, lines)
        except Problem as problem:
            answer = refused(problem, rules, lines)
        return wsgi._send(start_response, answer)

    def _answer(self, rules: Rules, environ: wsgi.Environ, key: str | None, lines: Sequence[bytes]) -> Answer:
        boundary = self.boundary
        hasher, monotonic = wsgi.hasher_of(environ, rules), boundary.receiver.flow.monotonic
        scope_of = partial(wsgi.scope_in, boundary)
        whose, taken = wsgi.ask_and_take_in(environ, rules, hasher, monotonic, scope_of)
        with taken:
            body = whole(taken)
        name = key if key is not None else natural_key(rules, wsgi.request_of(environ), body)
        fingerprint = hasher.digest()
        share = Share(boundary.quota, whose, rules.max_new_keys)

        def transaction(on: Any) -> Answer:
            receiver = boundary.receiver.on(on)
            exchange = AtomicExchange(boundary, rules, receiver, name, whose, share, lines=lines)
            known = run(exchange.open(fingerprint))
            if known is not None:
                return known
            token = CONNECTION.set(on)
            try:
                with exchange.at_work():
                    said = _collected_wsgi(self.app, {**environ, "wsgi.input": io.BytesIO(body)})
            except BaseException as error:
                answer = run(exchange.fail(error))
                if answer is None:
                    raise
                return answer
            finally:
                CONNECTION.reset(token)
            return run(exchange.end(said))

        try:
            return retrying(self.begin, transaction)
        except Exception as error:
            if may_help(error):
                raise _unavailable(boundary, error) from error
            raise


def _collected_wsgi(app: wsgi.App, environ: wsgi.Environ) -> Answer:
    said: list[tuple[int, Start]] = []
    pieces: list[bytes] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        if said and exc_info is None:
            raise AssertionError("The app called start_response twice.")
        code = int(status[:3])
        start = start_of(code, pairs_of(headers))
        if start.endless:
            raise _endless()
        said[:] = [(code, start)]
        pieces.clear()  # it takes back what it said
        return pieces.append

    result = app(environ, start_response)
    try:
        pieces.extend(result)
    finally:
        getattr(result, "close", lambda: None)()
    if not said:
        raise RuntimeError("The app answered without start_response.")
    ((code, start),) = said
    return Answer(code, start.headers, body_of(code, start.length, b"".join(pieces)))


def _endless() -> UsageError:
    return UsageError(
        "A stream of events has no end that the transaction could commit at, so it can't be answered in atomic mode. "
        "What the handler did is undone. Leave this route out by Route(path, covered=False), or answer where the "
        "events are to be had."
    )


def _unavailable(boundary: Boundary, error: Exception) -> Problem:
    """What a request gets whose transaction was tried in vain: the database is away, or in trouble with others."""
    boundary.complain(error)
    return Problem("store-unavailable", "Send the same request with the same key again.", retry_after=1.0)


def _awaits(on: Receiver) -> bool:
    return bool(cast("Any", on.store).adapter.awaits)
