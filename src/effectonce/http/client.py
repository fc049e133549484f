"""A client whose requests happen once: one key for each request, sent again until there is an answer.

::

    client = httpx.Client(transport=IdempotencyTransport())         # AsyncClient: AsyncIdempotencyTransport
    client.post("https://api.example.com/charges", json={"cents": 500})

    session.mount("https://", IdempotencyAdapter())                 # a requests.Session

A POST or PATCH gets an Idempotency-Key, unless it has one, and keeps it on every try. Connections that break, time-outs
and answers of passing trouble are followed by another try; a first try that still runs is asked for until it ends.
``_retrying`` has the rules, and ``Rules`` says what can be chosen. The last answer is returned, the last error raised::

    delivery(response)      how many tries it took, and the key; in httpx also response.extensions["effectonce"],
                            in requests response.effectonce
    replayed(response)      whether it is the first answer given again

A program that may die in between names its requests and has a ``Journal``, so that it finds their keys again::

    transport = IdempotencyTransport(journal=Journal("sent.db"))
    client.post(url, json=invoice, extensions={"effectonce_name": "invoice-77"})    # httpx
    with named("invoice-77"):                                                       # requests, and httpx as well
        session.post(url, json=invoice)

What to know:

- A key is a request to the server, which has to honour it. One that doesn't know keys runs every try. So give the
  transport those servers only: ``httpx.Client(mounts={"https://api.example.com": IdempotencyTransport()})``,
  ``session.mount("https://api.example.com/", IdempotencyAdapter())``, with the last slash, without which requests takes
  ``https://api.example.com.elsewhere.org/`` for one of them.
- ``client.post`` called twice is two requests with two keys. The same request object, or the same name, is one.
- Bytes can be sent again. A stream is read into memory first, up to ``Rules.buffer``; a longer one is sent once, with
  its key but without another try, and can't be named.
- A multipart form has another random boundary each time it is made, and so is another request to a restarted program,
  unless you fix the boundary.
- A redirection is another request. A key that was made here does not travel along: the request that follows gets one
  of its own. A key that you have set goes where the package takes it, and a server refuses it there with 422. A named
  request that is redirected is refused by its journal; send it to the place that it leads to.
- httpx hands TLS, HTTP/2, limits and proxies to its transport, so give them to the inner one:
  ``IdempotencyTransport(httpx.HTTPTransport(http2=True))``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

from .. import keys
from ..errors import StoreError, UsageError
from ._exchange import Problem, key_of, quoted
from ._journal import Entry, Journal
from ._lazy import loading
from ._retrying import Answer, Moment, Rules, is_redirect, is_replay

__all__ = [
    "AsyncIdempotencyTransport",
    "Delivery",
    "Entry",
    "IdempotencyAdapter",
    "IdempotencyTransport",
    "Journal",
    "Rules",
    "delivery",
    "named",
    "replayed",
]

T = TypeVar("T")
R = TypeVar("R")
Settle = Callable[[], Coroutine[Any, Any, None]]
"""Writes down that an answer is here."""

DEFAULT_RULES = Rules()
NAME_EXTENSION, SHOWN_AS = "effectonce_name", "effectonce"

TOO_SLOW = "The answer did not arrive whole within the budget."

NAME: ContextVar[str | None] = ContextVar(NAME_EXTENSION, default=None)


if TYPE_CHECKING:
    from ._httpx import AsyncIdempotencyTransport, IdempotencyTransport
    from ._requests import IdempotencyAdapter
else:
    __getattr__ = loading(
        __name__,
        {
            "AsyncIdempotencyTransport": "_httpx",
            "IdempotencyAdapter": "_requests",
            "IdempotencyTransport": "_httpx",
        },
    )


class Delivery(NamedTuple):
    """What it took to get an answer."""

    key: str | None
    attempts: int
    replayed: bool
    name: str | None = None


def delivery(response: Any) -> Delivery | None:
    """What it took to get this answer; None if it came another way, or its method is left alone."""
    extensions = getattr(response, "extensions", None)
    found = getattr(response, SHOWN_AS, None) if extensions is None else extensions.get(SHOWN_AS)
    return found if isinstance(found, Delivery) else None


def replayed(response: Any) -> bool:
    """Whether a response says that it is the first answer given again."""
    return is_replay(response.headers)


@contextmanager
def named(name: str) -> Iterator[None]:
    """Name the request that is sent in this block, for the journal of its transport."""
    token = NAME.set(keys.check_id(name))
    try:
        yield
    finally:
        NAME.reset(token)


# -- What the packages share ----------------------------------------------------------------------------------------


class Deadline(NamedTuple):
    """When the budget is used up, and the clock that measures it."""

    ends: float
    monotonic: Callable[[], float]

    @property
    def left(self) -> float:
        """Seconds until then."""
        return self.ends - self.monotonic()


class KeyHeader:
    """The key of an errand, in the headers of its request."""

    request: Any
    _header: str

    @property
    def key(self) -> str | None:
        """The key's header. To set it is to set the header; None takes it away."""
        value: str | bytes | None = self.request.headers.get(self._header)
        return value.decode("latin-1") if isinstance(value, bytes) else value

    @key.setter
    def key(self, value: str | None) -> None:
        if value is None:
            self.request.headers.pop(self._header, None)
        elif value != self.key:
            self.request.headers[self._header] = value


class Errand(Protocol[R]):
    """One request, as its package and the colour of its caller have it."""

    method: str
    url: str
    name: str | None

    @property
    def key(self) -> str | None:
        """The key's header as it stands. To set it is to set the header; None takes it away."""
        ...

    @key.setter
    def key(self, value: str | None) -> None: ...

    async def body(self, limit: int) -> bytes | None:
        """What is to be sent, if it can be sent again. A stream of no more than ``limit`` bytes can be, then."""
        ...

    async def attempt(self, deadline: Deadline, rules: Rules) -> tuple[R, Answer]:
        """Send it once, and read the answer as far as it is held."""
        ...

    def may_pass(self, error: Exception) -> bool:
        """Whether another try may meet with no such error."""
        ...

    def show(self, response: R, delivery: Delivery) -> None:
        """Put on the response what it took to get it."""
        ...

    async def drop(self, response: R) -> None:
        """Give up a response and its connection."""
        ...

    async def when_read(self, response: R, settle: Settle, advice: str) -> None:
        """Settle when all of a response has been read, or its reader has enough of it; never one that is cut off.

        An error of reading gets the advice.
        """
        ...

    async def pause(self, seconds: float) -> None:
        """Let time pass."""
        ...

    async def aside(self, work: Callable[..., T], *args: Any) -> T:
        """Do work that waits for a disk."""
        ...


class Courier:
    """Sends requests until there is an answer. Both packages and both colours share every line."""

    def __init__(self, rules: Rules, journal: Journal | None, monotonic: Callable[[], float]) -> None:
        if not isinstance(rules, Rules):
            raise UsageError(f'rules={rules!r} are not Rules. Write Rules(budget="30s", ...).')
        if not isinstance(journal, Journal | None):
            raise UsageError(f'journal={journal!r} is not a Journal. Write Journal("sent.db").')
        self.rules, self.journal, self.monotonic = rules, journal, monotonic

    def covers(self, method: str) -> bool:
        """Whether requests of this method are more than passed on."""
        return method in self.rules.methods or method in self.rules.retry

    async def deliver(self, errand: Errand[R]) -> R:
        """Send a request, again where that helps: the last answer, or the last error."""
        body = await errand.body(self.rules.buffer)
        own_key, name = errand.key, None
        if errand.method in self.rules.methods:
            name = errand.name
            errand.key = await self._key_of(errand, body)
        response, answer, attempts = await self._insist(errand, again=body is not None)
        if name is not None and self.journal is not None and self.rules.settles(answer):
            settle = partial(_settle, errand, self.journal, name)
            try:
                await errand.when_read(response, settle, _advice(errand.key or "", attempts))
            except BaseException:
                await errand.drop(response)
                raise
        errand.show(response, Delivery(_plain(errand.key), attempts, is_replay(answer.headers), name))
        if own_key is None and is_redirect(answer):
            errand.key = None  # of this request the package makes the next one
        return response

    async def _insist(self, errand: Errand[R], *, again: bool) -> tuple[R, Answer, int]:
        deadline = Deadline(self.monotonic() + self.rules.budget, self.monotonic)
        number = 0
        while True:
            number += 1
            wait: float | None = None
            try:
                response, answer = await errand.attempt(deadline, self.rules)
            except Exception as error:
                may_pass = errand.may_pass(error)
                if again and may_pass:
                    wait = self.rules.wait_after_error(_moment(number, deadline))
                if wait is None:
                    if may_pass and errand.key:
                        error.add_note(_advice(errand.key, number))
                    raise
            else:
                if again:
                    wait = self.rules.wait_after(answer, _moment(number, deadline))
                if wait is None:
                    return response, answer, number
                await errand.drop(response)
            await errand.pause(wait)

    async def _key_of(self, errand: Errand[Any], body: bytes | None) -> str:
        """The key of a request: its own, the one that it had before the program died, or a new one."""
        given, name = errand.key, errand.name
        key = quoted(keys.uuid7()).decode() if given is None else given
        if name is None:
            return key
        if self.journal is None:
            raise UsageError(f"The request is named {name!r}, but its transport has no journal=.")
        if body is None:
            raise UsageError(
                f"The body of {name!r} is a stream of more than {self.rules.buffer} bytes, so nobody can tell "
                "whether a restarted program sends the same. Give it as bytes, or raise Rules(buffer=...)."
            )
        asked = keys.fingerprint(f"{errand.method} {errand.url}\n".encode() + body)
        entry = await errand.aside(self.journal.begin, name, _shown(errand), asked, key)
        if given not in (None, entry.key):
            raise UsageError(
                f"The request named {name!r} had another key before. Leave its key to its name.", key=given
            )
        return entry.key


def _moment(number: int, deadline: Deadline) -> Moment:
    return Moment(number, deadline.left, random.random(), time.time())


async def _settle(errand: Errand[Any], journal: Journal, name: str) -> None:
    """The answer is here. If that can't be written down, the request stays in doubt, which harms nobody."""
    try:
        await errand.aside(journal.done, name)
    except StoreError as error:
        import logging

        logging.getLogger(__name__).warning("%s was answered and stays in doubt: %s", name, error)


def _plain(header: str | None) -> str | None:
    """The key that a header gives; what stands there, if that is none."""
    try:
        return None if header is None else key_of([header.encode("latin-1", "replace")])
    except Problem:
        return header


def _shown(errand: Errand[Any]) -> str:
    """Method and place, without what a URL may hold in confidence."""
    parts = urlsplit(errand.url)
    place = parts.netloc.rpartition("@")[2]
    return f"{errand.method} {parts.scheme}://{place}{parts.path}"


def _advice(key: str, attempts: int) -> str:
    tries = "one try" if attempts == 1 else f"{attempts} tries"
    return f"No answer after {tries} with the key {key}. Send the same request with the same key to find out."


async def hold(
    piece: Callable[[], Awaitable[bytes | None]], limit: int, deadline: Deadline | None = None
) -> tuple[list[bytes], bool]:
    """Pieces of a stream, and whether these are all: not if it is longer than ``limit``. Raises ``TimeoutError``."""
    held: list[bytes] = []
    size = 0
    while (part := await piece()) is not None:
        held.append(part)
        size += len(part)
        if size > limit:
            return held, False
        if deadline is not None and deadline.left < 0:
            raise TimeoutError(TOO_SLOW)
    return held, True
