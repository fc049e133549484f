"""ASGI: ``IdempotencyMiddleware(app, receiver, scope=…)`` for Starlette, FastAPI, Litestar, Quart and every other app.

A covered request's body is read first, because it is part of what was asked. The app runs in a task of its own, so that
a client that goes away, and a server that cancels because of it, change nothing. What it answers is held until it is
recorded; then it is sent. A response that is too large to hold, or has no end, is recorded as done without its body
and then streamed. Every other request passes through untouched. ``_asgi_body`` has what comes in, ``_asgi_app`` the app
and what it answers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Unpack

from .._receiver import Receiver
from ._asgi_app import App, Claimable, Covered, Send, request_of, seen_path, send_answer
from ._asgi_body import Gone, Receive, asked_at_once, begin, check_size, close, take_in, whole
from ._boundary import Boundary, Exchange, key_missing, natural_key, refused
from ._exchange import PUBLIC, Problem, key_of
from ._names import checked_scope
from ._rules import SAFE, Route, RuleWords, Scope
from ._wishes import unheard

__all__ = ["App", "IdempotencyMiddleware", "Send"]


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
        self.app = app
        self.boundary = Boundary(receiver, scope, routes, **rules)
        self._caller = scope if callable(scope) else None
        self.running: set[Covered] = set()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """The way of a request, written out in one place: every one of them pays for each step."""
        rules = None
        if scope["type"] == "http" and (method := scope["method"]) not in SAFE:
            rules = self.boundary.everywhere.get(method) or self.boundary.rules_for(method, seen_path(scope))
        if rules is None:
            await self.app(scope, receive, send)
            return
        boundary, spool = self.boundary, None
        lines: tuple[bytes, ...] = ()
        try:
            header, length = rules.header_name, None
            for name, value in scope["headers"]:
                if name == header:
                    lines += (value,)
                elif name == b"content-length" and value.isdigit():
                    length = int(value[:19])  # the first digits are enough to refuse a body that has more
            if rules.claim == "handler":
                await Claimable(self, rules, scope, receive, send).let_pass(lines, length)
                return
            key = key_of(lines, rules.strict)
            if key is None and rules.key is None:
                if rules.required:
                    raise key_missing(rules)
                with unheard():
                    await self.app(scope, receive, send)
                return
            whose = PUBLIC
            if self._caller is not None:
                named = self._caller(request_of(scope))
                if type(named) is not str and inspect.isawaitable(named):
                    named = await named
                whose = checked_scope(named)
            if length is not None and length > rules.max_request:
                check_size(length, rules)
            message, coming = begin(receive)
            if message is not None and (asked := asked_at_once(scope, rules, message, length)):
                fingerprint, body = asked, message["body"]
            else:
                fingerprint, body = await take_in(scope, rules, receive, length, message, coming)
                spool = body
            if key is None:
                key = natural_key(rules, request_of(scope), await whole(body))
            exchange = Exchange(boundary, rules, boundary.receiver.asyncio, key, whose, lines)
            answer = await exchange.open(fingerprint)
            if answer is None:
                spool = None  # which is the app's from now on
                await Covered(self, rules, scope, receive, send, exchange, body).start()
                return
            status, headers, said = answer
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": said, "more_body": False})
        except Problem as problem:
            await send_answer(send, refused(problem, rules, lines))
        except Gone:
            pass
        finally:
            if spool is not None:
                close(spool)
