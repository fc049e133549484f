"""Django: ``effectonce.http.django.IdempotencyMiddleware`` in ``MIDDLEWARE``, and ``EFFECTONCE`` in the settings.

    EFFECTONCE = {
        "store": "postgresql://…",                   # or "receiver": "shop.effects.receiver"
        "scope": "shop.effects.caller",              # def caller(request): return request.raw.user.pk
        "routes": [Route("/search/**", covered=False)],
        "keep": "48h",                               # and every other word of the rules
    }

    @idempotent(keep="7d")                           # what a view says of itself goes first
    def pay(request): ...

    @not_idempotent
    def search(request): ...

Put it below what says who is calling (``AuthenticationMiddleware``), and below what makes answers of its own to every
request, such as cookies and compression: what is below it is remembered, what is above it runs for repeats, too.

One body serves both of Django's colours; ``_Sync`` and ``_Async`` are what differs. On an event loop the view runs in a
task of its own, so that a client that goes away changes nothing. Above a middleware that knows no loop Django has
threads under ASGI, too: there ``to_its_end`` is what shields. Django makes a response of a view's exception before any
middleware sees it: a status from 500 on stands for it, and its type is heard by the way. With ``ATOMIC_REQUESTS`` a
view's transaction has ended by then, so what is remembered has been committed, and what raised was rolled back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import cache
from io import BytesIO
from typing import IO, Any, TypeVar, Unpack, cast, overload

from .._blocking import run
from .._receiver import Receiver
from ..errors import MissingExtra, UsageError
from ._boundary import Boundary, Exchange, claimed_here, key_in, natural_key, refused
from ._django_streams import at_once, awaited, chained, chained_later, in_threads, to_its_end
from ._exchange import BODILESS, PUBLIC, Answer, Hasher, Problem, body_of, pairs_of, start_of
from ._intake import IN_MEMORY, OnDemand, take_in, take_in_from, whole
from ._names import checked_scope
from ._rules import Request, Rules, RuleWords, mark, mark_of
from ._wishes import raised, unheard

try:
    from asgiref.sync import async_to_sync, iscoroutinefunction, markcoroutinefunction, sync_to_async
    from django.conf import settings  # type: ignore[import-untyped]
    from django.core.exceptions import ImproperlyConfigured  # type: ignore[import-untyped]
    from django.core.handlers.asgi import ASGIRequest  # type: ignore[import-untyped]
    from django.http import HttpResponse  # type: ignore[import-untyped]
    from django.urls import Resolver404, resolve  # type: ignore[import-untyped]
    from django.utils.log import request_logger  # type: ignore[import-untyped]
    from django.utils.module_loading import import_string  # type: ignore[import-untyped]
except ImportError as error:
    raise MissingExtra("effectonce.http.django needs Django: pip install 'effectonce[django]'.") from error

__all__ = ["IdempotencyMiddleware", "Misconfigured", "idempotent", "not_idempotent"]

View = TypeVar("View", bound=Callable[..., Any])


class Misconfigured(UsageError, ImproperlyConfigured):  # type: ignore[misc]
    """The setting ``EFFECTONCE`` is missing or wrong."""


@overload
def idempotent(view: View, /) -> View: ...
@overload
def idempotent(**rules: Unpack[RuleWords]) -> Callable[[View], View]: ...
def idempotent(view: Any = None, /, **rules: Any) -> Any:
    """Decorate a view that is covered, whatever its path says; with rules of its own: ``@idempotent(keep="7d")``.

    For a class: ``@method_decorator(idempotent, name="dispatch")``.
    """
    return mark(view, **rules) if view is not None else lambda view: mark(view, **rules)


def not_idempotent(view: View) -> View:
    """Decorate a view whose requests are not covered."""
    return mark(view, covered=False)


class IdempotencyMiddleware:
    """Every covered request happens once."""

    sync_capable = async_capable = True

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        self.boundary, self.get_response = _configured(), get_response
        self._side = _Async(self) if iscoroutinefunction(get_response) else _Sync(self)
        if isinstance(self._side, _Async):
            markcoroutinefunction(self)

    def __call__(self, request: Any) -> Any:
        rules = self._rules_for(request)
        if rules is None:
            return self.get_response(request)
        try:
            key = key_in(rules, _lines(request, rules.header))
        except Problem as problem:
            return self._side.drive(_answered(problem, rules, ()))
        if key is None and rules.key is None:
            return self._side.drive(self._side.let_pass(request))
        return self._side.drive(self._covered(self.boundary, self._side, rules, request).run(key))

    @property
    def _covered(self) -> type[_Covered]:
        """How a covered request is answered."""
        return _Covered

    def process_exception(self, request: Any, exception: Exception) -> None:
        """A view raised; Django will make a response of it."""
        raised(exception)

    def _rules_for(self, request: Any) -> Rules | None:
        """The rules for a request, by its view and its path; None if it is not covered."""
        if not self.boundary.concerns(request.method):
            return None
        try:
            own = mark_of(resolve(request.path_info, getattr(request, "urlconf", None)).func)
        except Resolver404:  # which is for Django to say
            own = None
        return self.boundary.rules_for(request.method, request.path_info, own)


async def _answered(problem: Problem, rules: Rules, lines: Sequence[bytes]) -> Any:
    return _response(refused(problem, rules, lines))


class _Covered:
    """One covered request, in the colour of its side."""

    def __init__(self, boundary: Boundary, side: _Sync | _Async, rules: Rules, request: Any) -> None:
        self._boundary, self._side, self._rules, self._request = boundary, side, rules, request

    async def run(self, key: str | None) -> Any:
        """Answer it, by running the view or without."""
        try:
            return await self._run(key)
        except Problem as problem:
            return await _answered(problem, self._rules, self._lines)

    async def _run(self, key: str | None) -> Any:
        boundary, rules, side, request = self._boundary, self._rules, self._side, self._request
        query = request.META.get("QUERY_STRING", "")
        seen = Request(request.method, request.path_info, query, request.headers, request)
        path = request.path.encode("utf-8", "surrogatepass"), query.encode("utf-8", "surrogatepass")
        hasher = Hasher(request.method, *path, rules.fingerprint)
        monotonic = boundary.receiver.flow.monotonic
        coming = _body_of(request, rules, hasher, monotonic)
        scope = checked_scope(await side.scope(seen))
        body = await side.reading(request, coming.taken)
        _give(request, body)
        if key is None:
            key = natural_key(rules, seen, whole(body))
        self._exchange = self._exchange_for(key, scope)
        answer = await self._exchange.open(hasher.digest())
        return await side.shielded(self._handle()) if answer is None else _response(answer)

    @property
    def _lines(self) -> list[bytes]:
        return _lines(self._request, self._rules.header)

    def _exchange_for(self, key: str, scope: str) -> Exchange:
        return Exchange(self._boundary, self._rules, self._side.colour, key, scope, self._lines)

    async def _handle(self) -> Any:
        exchange = self._exchange
        try:
            try:
                with exchange.at_work():
                    response = await self._side.respond(self._request, exchange)
                    said, rest = await self._collect(response)
            except BaseException as error:
                return _response(await self._failed(error))
            instead = await exchange.record(said)
        except BaseException:
            exchange.abandon()
            raise
        if instead is not None:
            return _response(instead, response)
        if rest is not None:
            response.streaming_content = rest
        for name, value in exchange.marks:
            _add(response, name, value)
        return response

    async def _collect(self, response: Any) -> tuple[Answer, Any]:
        """What a response says, without a body if it can't be held; and what a streaming one has to stream now."""
        status, most = response.status_code, self._rules.max_response
        headers, length, endless = start_of(status, pairs_of(response.items()))
        said = Answer(status, headers, None)
        if status in BODILESS:
            del response["Content-Length"]
        if not response.streaming:
            body = body_of(status, length, response.content)
            if status in BODILESS:
                response.content = body
            return said._replace(body=None if len(body) > most or endless else body), None
        pieces = self._side.pieces(self._request, response)
        held: list[bytes] = []
        size = 0
        while size <= most and not endless:
            piece = await self._side.next_of(pieces)
            if piece is None:
                body = body_of(status, length, b"".join(held))
                return said._replace(body=body), self._side.again(body, pieces)
            held.append(piece)
            size += len(piece)
        return said, self._side.chained(self._exchange, b"".join(held), pieces)

    async def _failed(self, error: BaseException) -> Answer:
        """Something raised that Django makes no response of, such as a stream. Gives what counts more, if anything."""
        answer = await self._exchange.fail(error)
        if answer is None:
            raise error
        request_logger.error("%s", self._request.path, exc_info=error)
        return answer


# -- The two colours -----------------------------------------------------------------------------------------------


class _Sync:
    """A middleware in a stack of threads, under WSGI or, where one below knows no event loop, under ASGI.

    Nothing here ever suspends.
    """

    def __init__(self, middleware: IdempotencyMiddleware) -> None:
        boundary = middleware.boundary
        self._get_response, self.colour = middleware.get_response, boundary.receiver.blocking
        self._scope = (
            async_to_sync(boundary.scope) if iscoroutinefunction(boundary.scope) else boundary.scope_of
        )

    def drive(self, answering: Coroutine[Any, Any, Any]) -> Any:
        return run(answering)

    async def scope(self, request: Request) -> Any:
        return self._scope(request)

    async def reading(self, request: Any, read: Callable[[], IO[bytes]]) -> IO[bytes]:
        return read()

    async def shielded(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await work

    async def let_pass(self, request: Any) -> Any:
        with unheard():
            return self._get_response(request)

    async def respond(self, request: Any, exchange: Exchange) -> Any:
        if isinstance(request, ASGIRequest):
            return to_its_end(sync_to_async(self._get_response), request)
        return self._get_response(request)

    def pieces(self, request: Any, response: Any) -> Iterator[bytes] | AsyncIterator[bytes]:
        """An async stream is read on the event loop that it belongs to; without one at once, as Django would."""
        stream: Any = response.streaming_content
        if response.is_async and not isinstance(request, ASGIRequest):
            stream = at_once(stream)
        return cast("Iterator[bytes] | AsyncIterator[bytes]", stream)

    async def next_of(self, pieces: Any) -> bytes | None:
        return to_its_end(anext, pieces, None) if isinstance(pieces, AsyncIterator) else next(pieces, None)

    def again(self, body: bytes, pieces: Any) -> Iterable[bytes] | AsyncIterator[bytes]:
        return awaited([body]) if isinstance(pieces, AsyncIterator) else [body]

    def chained(self, exchange: Exchange, held: bytes, rest: Any) -> Iterator[bytes] | AsyncIterator[bytes]:
        if isinstance(rest, AsyncIterator):
            return chained_later(exchange, held, rest)
        return chained(exchange, held, rest)


class _Async:
    """A middleware on an event loop."""

    def __init__(self, middleware: IdempotencyMiddleware) -> None:
        boundary = middleware.boundary
        self._get_response, self.colour = middleware.get_response, boundary.receiver.asyncio
        self._public = boundary.scope == PUBLIC
        # A plain function may ask the database who is calling, as ``request.user`` does.
        self._scope: Any = (
            boundary.scope if iscoroutinefunction(boundary.scope) else sync_to_async(boundary.scope_of)
        )
        self._running: set[asyncio.Task[Any]] = set()

    def drive(self, answering: Coroutine[Any, Any, Any]) -> Any:
        return answering

    async def scope(self, request: Request) -> Any:
        return PUBLIC if self._public else await self._scope(request)

    async def reading(self, request: Any, read: Callable[[], IO[bytes]]) -> IO[bytes]:
        """Read what may be on the disk where that blocks nobody."""
        length = request.META.get("CONTENT_LENGTH") or ""
        return read() if length.isdecimal() and int(length) <= IN_MEMORY else await asyncio.to_thread(read)

    async def shielded(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Await something that goes on when this is cancelled, as Django does when a client leaves."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def let_pass(self, request: Any) -> Any:
        with unheard():
            return await self._get_response(request)

    async def respond(self, request: Any, exchange: Exchange) -> Any:
        return await self.colour.attend(exchange.attempt, self._get_response(request))

    def pieces(self, request: Any, response: Any) -> AsyncIterator[bytes]:
        content = response.streaming_content
        return aiter(content) if response.is_async else in_threads(content)

    async def next_of(self, pieces: Any) -> bytes | None:
        return await anext(pieces, None)

    def again(self, body: bytes, pieces: Any) -> AsyncIterator[bytes]:
        return awaited([body])

    def chained(self, exchange: Exchange, held: bytes, rest: Any) -> AsyncIterator[bytes]:
        return chained_later(exchange, held, rest)


# -- Requests and responses ----------------------------------------------------------------------------------------


def _body_of(request: Any, rules: Rules, hasher: Hasher, monotonic: Callable[[], float]) -> OnDemand:
    """The body, to be read to its end when it is asked for, which a scope function may do first."""
    if not hasattr(request, "_body") and request._read_started:
        raise UsageError("A middleware above effectonce's reads the request piece by piece. Move it below.")
    stream, environ = request._stream, getattr(request, "environ", None)

    def taken() -> IO[bytes]:
        if hasattr(request, "_body"):  # something above has read it, and it is there for everybody
            body = take_in(BytesIO(request.body).read, len(request.body), rules, hasher, monotonic)
        elif environ is None:
            body = take_in(stream.read, _length(stream, request.META), rules, hasher, monotonic)
        else:
            body = take_in_from(environ, rules, hasher, monotonic)
        _close_with(request, body)
        return body

    request._stream = coming = _Coming(taken)
    return coming


class _Coming(OnDemand):
    """Django closes what it has read to its end. This is for the view to read as well, and closed with its request."""

    def close(self) -> None:
        """Stay open."""


def _give(request: Any, body: IO[bytes]) -> None:
    """Put a body where the view will look for it, from its beginning."""
    body.seek(0)
    request._stream, request._read_started = body, False


def _close_with(request: Any, body: IO[bytes]) -> None:
    """Close a body with its request, which Django does after any response, also one that it has made of an error."""
    close = request.close

    def close_both() -> None:
        close()
        body.close()

    request.close = close_both


def _length(stream: Any, meta: dict[str, Any]) -> int:
    """How long a body is that an ASGI request holds already."""
    if not stream.seekable():
        return int(meta.get("CONTENT_LENGTH") or 0)
    length: int = stream.seek(0, 2)
    stream.seek(0)
    return length


def _lines(request: Any, header: str) -> list[bytes]:
    """The lines of a header. Under WSGI several have become one by now, with commas; so a key of two lines is none."""
    if isinstance(request, ASGIRequest):
        name = header.lower().encode()
        return [value for each, value in request.scope["headers"] if each == name]
    line: str | None = request.META.get("HTTP_" + header.upper().replace("-", "_"))
    return [] if line is None else [line.encode("latin-1", "backslashreplace")]


def _response(answer: Answer, in_place_of: Any = None) -> Any:
    """A response that gives an answer. What one that it takes the place of holds is given back with it."""
    response = HttpResponse(answer.body or b"", status=answer.status)
    del response["Content-Type"]  # Django's, unless the answer has one
    for name, value in answer.headers:
        _add(response, name, value)
    if in_place_of is not None:
        response._resource_closers.extend(in_place_of._resource_closers)
    return response


def _add(response: Any, name: bytes, value: bytes) -> None:
    """Add a line of a header; Django has one line for each, so that others join it."""
    text = value.decode("latin-1")
    before = response.get(name.decode("latin-1"))
    response[name.decode("latin-1")] = text if before is None else f"{before}, {text}"


# -- Settings ------------------------------------------------------------------------------------------------------


def _configured() -> Boundary:
    """The boundary that the settings describe."""
    words = getattr(settings, "EFFECTONCE", None)
    if not isinstance(words, dict):
        raise Misconfigured(
            'The setting EFFECTONCE is missing: a dict with "store" or "receiver", and "scope".'
        )
    words = dict(words)
    receiver, store = words.pop("receiver", None), words.pop("store", None)
    if (receiver is None) == (store is None):
        raise Misconfigured(
            'EFFECTONCE needs "store", a URL, or "receiver", where to find one; and not both.'
        )
    if "scope" not in words:
        raise Misconfigured(
            'EFFECTONCE["scope"] is missing: say whose keys these are, by a function of the request that gives the '
            "caller's name or by where to find it, or say PUBLIC if all callers may see each other's answers."
        )
    scope = words.pop("scope")
    try:
        found = _found(scope) if scope != PUBLIC else PUBLIC
        return claimed_here(Boundary(_receiver(receiver, store), found, **words))
    except (UsageError, ImportError) as error:
        raise Misconfigured(f"EFFECTONCE: {error}") from error


def _receiver(receiver: Any, store: Any) -> Receiver:
    if receiver is None or (isinstance(receiver, str) and "://" in receiver):
        return _opened(store or receiver)
    found = _found(receiver)
    if not isinstance(found, Receiver) and callable(found):
        found = found()
    if not isinstance(found, Receiver):
        raise UsageError(f"{receiver!r} is not a Receiver, nor a function that gives one.")
    return found


@cache
def _opened(store: Any) -> Receiver:
    """One receiver for each store and process, however often Django builds its stack."""
    return Receiver(store)


def _found(named: Any) -> Any:
    """What a dotted path names; anything else stands for itself."""
    return import_string(named) if isinstance(named, str) else named
