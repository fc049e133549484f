"""Client sessions over HTTP: middlewares for ASGI and WSGI, and clients on httpx and requests.

::

    sessions = Sessions(receiver)
    app = SessionMiddleware(app, receiver, scope=caller, sessions=sessions)            # ASGI
    app = WSGISessionMiddleware(app, receiver, scope=caller, sessions=sessions)        # WSGI

    session = http_session("https://api.example.com/session", httpx.Client(auth=...))
    client = httpx.Client(mounts={"https://api.example.com": SessionTransport(session)})    # AsyncSessionTransport
    requests_session.mount("https://api.example.com/", SessionAdapter(session))

The client id is a secret between the two: give a transport that server only. The middlewares are those of ``asgi`` and
``wsgi``: a request with ``Client-Id`` is one of a session, every other goes by its Idempotency-Key.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Unpack

from .._blocking import run
from .._receiver import Receiver
from ..sessions import ClientSession, Journal, Sessions
from . import asgi, wsgi
from ._asgi_app import Covered, request_of, seen_path, send_answer
from ._asgi_body import Gone, Receive, begin, check_size, close, declared_length, take_in
from ._boundary import claimed_here
from ._exchange import PUBLIC, Problem
from ._lazy import loading
from ._names import checked_scope
from ._rules import Headers, Route, Rules, RuleWords, Scope
from ._sessions import CLIENT_HEADER, DEFAULT_PATH, SessionExchange, SessionPath, opened_from, request_in

__all__ = [
    "AsyncSessionTransport",
    "SessionAdapter",
    "SessionMiddleware",
    "SessionTransport",
    "WSGISessionMiddleware",
    "ahttp_session",
    "http_session",
]

if TYPE_CHECKING:
    from ._session_httpx import AsyncSessionTransport, SessionTransport
    from ._session_requests import SessionAdapter
else:
    __getattr__ = loading(
        __name__,
        {
            "AsyncSessionTransport": "_session_httpx",
            "SessionAdapter": "_session_requests",
            "SessionTransport": "_session_httpx",
        },
    )


class SessionMiddleware(asgi.IdempotencyMiddleware):
    """``asgi.IdempotencyMiddleware`` that knows client sessions, too.

    sessions      the server's sessions
    session_path  where clients register; nothing there reaches the app
    """

    def __init__(
        self,
        app: asgi.App,
        receiver: Receiver,
        *,
        scope: Scope,
        sessions: Sessions,
        session_path: str = DEFAULT_PATH,
        routes: Iterable[Route] = (),
        **rules: Unpack[RuleWords],
    ) -> None:
        super().__init__(app, receiver, scope=scope, routes=routes, **rules)
        claimed_here(self.boundary)  # a session belongs to somebody before any handler runs
        self._sessions = SessionPath(sessions, session_path, self.boundary)

    async def __call__(self, scope: Any, receive: Receive, send: asgi.Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, method = seen_path(scope), scope["method"]
        rules = self.boundary.rules_for(method, path)
        is_numbered = any(name == CLIENT_HEADER for name, _ in scope["headers"])
        try:
            if path == self._sessions.path:
                await self._answer(scope, send)
            elif rules is not None and is_numbered:
                await self._number(rules, scope, receive, send)
            else:
                await super().__call__(scope, receive, send)
        except Problem as problem:
            await send_answer(send, problem.answer((rules or self.boundary.rules).documentation))
        except Gone:
            pass

    async def _answer(self, scope: Any, send: asgi.Send) -> None:
        """What a client gets at the session path."""
        store = self._sessions.sessions.receiver.asyncio.store
        headers = Headers(scope["headers"])
        answer = await self._sessions.answer(store, scope["method"], headers, await self._whose(scope))
        await send_answer(send, answer)

    async def _number(self, rules: Rules, scope: Any, receive: Receive, send: asgi.Send) -> None:
        """The way of a numbered request."""
        headers = Headers(scope["headers"])
        request, whose = request_in(headers), await self._whose(scope)
        length = declared_length(scope)
        check_size(length or 0, rules)
        message, coming = begin(receive)
        fingerprint, body = await take_in(scope, rules, receive, length, message, coming)
        sessions = self._sessions.sessions
        exchange = SessionExchange(self.boundary, rules, sessions.receiver.asyncio, request, whose, sessions)
        try:
            answer = await exchange.open(fingerprint)
        except BaseException:
            close(body)
            raise
        if answer is None:
            await Covered(self, rules, scope, receive, send, exchange, body).start()
            return
        close(body)
        await send_answer(send, answer)

    async def _whose(self, scope: Any) -> str:
        if not callable(self.boundary.scope):
            return PUBLIC
        named = self.boundary.scope(request_of(scope))
        return checked_scope(await named if inspect.isawaitable(named) else named)


class WSGISessionMiddleware(wsgi.IdempotencyMiddleware):
    """``wsgi.IdempotencyMiddleware`` that knows client sessions, too; takes the words of ``SessionMiddleware``."""

    def __init__(
        self,
        app: wsgi.App,
        receiver: Receiver,
        *,
        sessions: Sessions,
        session_path: str = DEFAULT_PATH,
        **words: Any,
    ) -> None:
        super().__init__(app, receiver, **words)
        self._sessions = SessionPath(sessions, session_path, self.boundary)

    def __call__(self, environ: wsgi.Environ, start_response: wsgi.StartResponse) -> Iterable[bytes]:
        rules = self.rules_for(environ)
        try:
            if wsgi.path_of(environ) == self._sessions.path:
                sessions = self._sessions
                store, headers = sessions.sessions.receiver.blocking.store, wsgi.request_of(environ).headers
                scope = checked_scope(self.scope_of(environ))
                answer = run(sessions.answer(store, wsgi.method_of(environ), headers, scope))
                return wsgi._send(start_response, answer)
            if rules is not None and "HTTP_CLIENT_ID" in environ:
                return _Numbered(self, rules, environ, start_response, self._sessions.sessions).run(None)
        except Problem as problem:
            return wsgi._send(start_response, problem.answer((rules or self.boundary.rules).documentation))
        return super().__call__(environ, start_response)


class _Numbered(wsgi._Covered):
    """One request of a session."""

    def __init__(
        self,
        middleware: wsgi.IdempotencyMiddleware,
        rules: Rules,
        environ: wsgi.Environ,
        start_response: wsgi.StartResponse,
        sessions: Sessions,
    ) -> None:
        super().__init__(middleware, rules, environ, start_response)
        self._sessions, self._request = sessions, request_in(wsgi.request_of(environ).headers)

    def exchange_of(self, key: str | None, scope: str) -> SessionExchange:
        """The request on its way through the flow of sessions."""
        sessions = self._sessions
        boundary, colour = self._middleware.boundary, sessions.receiver.blocking
        return SessionExchange(boundary, self._rules, colour, self._request, scope, sessions)


# -- Clients --------------------------------------------------------------------------------------------------------


def http_session(url: str, client: Any, *, journal: Journal | None = None) -> ClientSession:
    """Register at a server's session path by an httpx.Client or requests.Session; go on with the journal's session."""
    response = client.request("POST", url, headers=_known(journal))
    response.raise_for_status()
    return ClientSession(opened_from(response.json()), journal=journal)


async def ahttp_session(url: str, client: Any, *, journal: Journal | None = None) -> ClientSession:
    """``http_session`` by an httpx.AsyncClient."""
    response = await client.request("POST", url, headers=_known(journal))
    response.raise_for_status()
    return ClientSession(opened_from(response.json()), journal=journal)


def _known(journal: Journal | None) -> dict[str, str]:
    known = None if journal is None else journal.client
    return {} if known is None else {"Client-Id": known}
