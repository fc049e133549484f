"""A request's body under ASGI: taken in before the claim, counted and hashed, then given to the app.

``take_in`` reads it to its end, for a boundary that claims before the app runs. ``Passing`` lets the app read it as it
comes, and takes in the rest when the handler claims: a request that nobody claims passes as if there were no boundary.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from tempfile import SpooledTemporaryFile
from types import coroutine
from typing import IO, Any

from ._exchange import Hasher, Problem, fingerprint_of, head_of
from ._rules import Rules

Message = Any
Receive = Callable[[], Awaitable[Message]]
Body = bytes | IO[bytes]

IN_MEMORY = 1 << 20
"""A longer body waits on the disk for the app to read it."""
MOST_HEADS, LONGEST_HEAD = 256, 1024
"""What is longer is not held to be known again."""
PIECE = 1 << 16
"""How much of it is read from there at once; and how much JSON is read without leaving the event loop."""


NOTHING: Any = None
"""Is to come after what is there."""


class Gone(Exception):
    """The client left before its request was complete: nothing was asked."""


def begin(receive: Receive) -> tuple[Message | None, Awaitable[Message]]:
    """The first message, if it is there already; else what to wait for.

    What is there already needs no clock, which would cost more than its hash.
    """
    heard: list[Message] = []
    coming = _hear(receive, heard).__await__()
    awaited = next(coming, None)
    return (heard[0], NOTHING) if heard else (None, _go_on(coming, awaited, heard))


async def _hear(receive: Receive, heard: list[Message]) -> None:
    """It gives nothing, because a coroutine that gives something does so by an exception."""
    heard.append(await receive())


def asked_at_once(scope: Any, rules: Rules, message: Message, declared: int | None) -> bytes | None:
    """What was asked by a request whose first message is all of it, as declared; else ``take_in`` has to look."""
    body = message.get("body")
    if (
        type(body) is not bytes
        or len(body) != declared
        or message.get("more_body")
        or message["type"] != "http.request"
        or rules.fingerprint != "body"
    ):
        return None
    asked = scope["method"], scope["path"], scope["query_string"]
    return fingerprint_of(_heads.get(asked) or _head_in(scope, asked), body)


_heads: dict[tuple[str, str, bytes], bytes] = {}
"""What goes before the bodies of requests, by method, path and query: most are of a few kinds."""


def _head_in(scope: Any, asked: tuple[str, str, bytes]) -> bytes:
    head = head_of(scope["method"], path_of(scope), scope["query_string"])
    if len(head) <= LONGEST_HEAD:
        if len(_heads) >= MOST_HEADS:
            _heads.clear()
        _heads[asked] = head
    return head


async def take_in(
    scope: Any,
    rules: Rules,
    receive: Receive,
    declared: int | None,
    message: Message | None,
    coming: Awaitable[Message],
) -> tuple[bytes, Body]:
    """What was asked, and the body. Raises ``Problem`` for a body that can't be taken in whole, and ``Gone``."""
    if message is None or message.get("more_body") or message["type"] != "http.request":
        return await _take_in_pieces(scope, rules, receive, declared, message, coming)
    body: bytes = message.get("body", b"")
    check_size(len(body), rules, declared)
    hasher = hasher_of(scope, rules)
    hasher.update(body)
    return await digest_of(hasher, len(body)), body


async def _take_in_pieces(
    scope: Any,
    rules: Rules,
    receive: Receive,
    declared: int | None,
    message: Message | None,
    coming: Awaitable[Message],
) -> tuple[bytes, Body]:
    size, spool = 0, SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 - closed with the request
    hasher = hasher_of(scope, rules)
    try:
        async with in_time(rules):
            while True:
                arrived: Message = message or await coming
                if arrived["type"] != "http.request":
                    raise Gone
                piece = arrived.get("body", b"")
                size += len(piece)
                check_size(size, rules)
                hasher.update(piece)
                await spill(spool, piece, size)
                if not arrived.get("more_body"):
                    break
                message, coming = None, receive()
        check_size(size, rules, declared)
        fingerprint = await digest_of(hasher, size)
    except BaseException:
        spool.close()
        raise
    spool.seek(0)
    if size > IN_MEMORY:
        return fingerprint, spool
    with spool:
        return fingerprint, spool.read()


class Passing:
    """The body of a request that the handler may claim: read by the app as it comes, and hashed on its way."""

    def __init__(self, scope: Any, rules: Rules, receive: Receive, *, keep: bool) -> None:
        self._rules, self._receive = rules, receive
        self._hasher = hasher_of(scope, rules)
        self._size = 0
        self._complete = False
        self._rest: Body | None = None  # what the app has still to read
        self._kept: list[bytes] | None = [] if keep else None

    async def give(self) -> Message:
        """The next message for the app, until the body has been given."""
        if self._rest is not None:
            message, more = await message_of(self._rest)
            self._rest = self._rest if more else None
            return message
        return self._note(await self._receive())

    @property
    def given(self) -> bool:
        """Whether the app has all of it."""
        return self._complete and self._rest is None

    async def take_in_rest(self, declared: int | None) -> bytes:
        """Read on to the end, for the app to read later: what was asked."""
        check_size(max(self._size, declared or 0), self._rules)
        if not self._complete:
            async with in_time(self._rules):
                await self._read_on()
        check_size(self._size, self._rules, declared)
        return await digest_of(self._hasher, self._size)

    def whole(self) -> bytes:
        """All of it, once it has been taken in."""
        return b"".join(self._kept or ())

    def close(self) -> None:
        """Let go of what is on the disk."""
        close(self._rest)

    async def _read_on(self) -> None:
        rest, before = SpooledTemporaryFile(max_size=IN_MEMORY), self._size  # noqa: SIM115 - closed with the request
        self._rest = rest
        while not self._complete:
            message = self._note(await self._receive())
            if message["type"] != "http.request":
                raise Gone
            check_size(self._size, self._rules)
            await spill(rest, message.get("body", b""), self._size - before)
        rest.seek(0)

    def _note(self, message: Message) -> Message:
        if message["type"] == "http.request":
            piece = message.get("body", b"")
            self._size += len(piece)
            self._complete = not message.get("more_body", False)
            if self._size <= self._rules.max_request:  # nobody asks what was asked in a larger one
                self._hasher.update(piece)
                if self._kept is not None:
                    self._kept.append(piece)
        return message


# -- Time ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def in_time(rules: Rules) -> AsyncIterator[None]:
    """For so long a body may keep us waiting."""
    try:
        async with asyncio.timeout(rules.patience):
            yield
    except TimeoutError:
        raise Problem("request-timeout", "Send the same request with the same key again.") from None


@coroutine
def _go_on(coming: Any, awaited: Any, heard: list[Message]) -> Generator[Any, Any, Message]:
    """Go on with a coroutine that waits for something."""
    while not heard:
        try:
            try:
                answer = yield awaited
            except BaseException as error:
                awaited = coming.throw(error)
            else:
                awaited = coming.send(answer)
        except StopIteration:
            break
    return heard[0]


# -- Parts ---------------------------------------------------------------------------------------------------------


def hasher_of(scope: Any, rules: Rules) -> Hasher:
    """What takes in what a request asks."""
    return Hasher(scope["method"], path_of(scope), scope["query_string"], rules.fingerprint)


def path_of(scope: Any) -> bytes:
    """The path as apps see it, which is the same however it was escaped, and whatever adapter asks."""
    path: bytes = scope["path"].encode("utf-8", "surrogatepass")
    return path


def declared_length(scope: Any) -> int | None:
    """How long a request says that its body is."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value[:19])  # the first digits are enough to refuse a body that has more
    return None


def check_size(size: int, rules: Rules, declared: int | None = None) -> None:
    """Refuse a body that is too large; and one that was cut short, where a server lets it pass as complete."""
    if size > rules.max_request:
        raise Problem("request-too-large", f"A body may have {rules.max_request} bytes.")
    if declared is not None and size != declared:
        raise Problem("request-incomplete", "Send the same request with the same key again.")


async def digest_of(hasher: Hasher, size: int) -> bytes:
    """What was asked. A large document is read apart, so that nobody waits for it."""
    return await asyncio.to_thread(hasher.digest) if size > PIECE else hasher.digest()


async def spill(spool: IO[bytes], piece: bytes, size: int) -> None:
    """Write to a spool that holds ``size`` bytes then; disks make nobody wait."""
    if size > IN_MEMORY:
        await asyncio.to_thread(spool.write, piece)
    else:
        spool.write(piece)


async def message_of(body: Body) -> tuple[Message, bool]:
    """The next message of a body, and whether there is more. Closes what it has read to the end."""
    if isinstance(body, bytes):
        return {"type": "http.request", "body": body, "more_body": False}, False
    piece = await asyncio.to_thread(body.read, PIECE)
    more = len(piece) == PIECE
    if not more:
        body.close()
    return {"type": "http.request", "body": piece, "more_body": more}, more


async def whole(body: Body) -> bytes:
    """All of a body, which can be given afterwards."""
    if isinstance(body, bytes):
        return body
    content = await asyncio.to_thread(body.read)
    body.seek(0)
    return content


def close(body: Body | None) -> None:
    """Let go of a body."""
    if body is not None and not isinstance(body, bytes):
        body.close()
