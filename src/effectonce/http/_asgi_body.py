"""A request's body under ASGI: taken in before the claim, counted and hashed, then given to the app.

``take_in`` reads it to its end, for a boundary that claims before the app runs. ``Passing`` lets the app read it as it
comes, and takes in the rest when the handler claims: a request that nobody claims passes as if there were no boundary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from tempfile import SpooledTemporaryFile
from typing import IO, Any

from ._boundary import Rules
from ._exchange import Hasher, Problem

Message = Any
Receive = Callable[[], Awaitable[Message]]
Body = bytes | IO[bytes]

IN_MEMORY = 1 << 20
"""A longer body waits on the disk for the app to read it."""
PIECE = 1 << 16
"""How much of it is read from there at once; and how much is hashed without leaving the event loop, if it is JSON."""


class Gone(Exception):
    """The client left before its request was complete: nothing was asked."""


async def take_in(scope: Any, rules: Rules, receive: Receive) -> tuple[bytes, Body]:
    """What was asked, and the body. Raises ``Problem`` for a body that can't be taken in whole, and ``Gone``."""
    declared = declared_length(scope, rules)
    hasher = hasher_of(scope, rules)
    deadline = Deadline(rules)
    try:
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            content: bytes = message.get("body", b"")
            size = len(content)
            check_size(size, rules)
            hasher.update(content)
            body: Body = content
        else:
            size, body = await _take_in_pieces(message, rules, receive, hasher)
    except asyncio.CancelledError:
        deadline.check()
        raise
    finally:
        deadline.end()
    try:
        check_complete(size, declared)
        return await digest(hasher, size, rules), body
    except BaseException:
        close(body)
        raise


async def _take_in_pieces(
    message: Message, rules: Rules, receive: Receive, hasher: Hasher
) -> tuple[int, Body]:
    size, spool = 0, SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 - closed with the request
    try:
        while True:
            if message["type"] != "http.request":
                raise Gone
            piece = message.get("body", b"")
            size += len(piece)
            check_size(size, rules)
            hasher.update(piece)
            await spill(spool, piece, size)
            if not message.get("more_body", False):
                break
            message = await receive()
    except BaseException:
        spool.close()
        raise
    spool.seek(0)
    if size > IN_MEMORY:
        return size, spool
    with spool:
        return size, spool.read()


class Passing:
    """The body of a request that the handler may claim: read by the app as it comes, and hashed on its way."""

    def __init__(self, scope: Any, rules: Rules, receive: Receive, *, keep: bool) -> None:
        self._scope, self._rules, self._receive = scope, rules, receive
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

    async def take_in_rest(self) -> bytes:
        """Read on to the end, for the app to read later: what was asked."""
        declared = declared_length(self._scope, self._rules)
        check_size(self._size, self._rules)
        if not self._complete:
            deadline = Deadline(self._rules)
            try:
                await self._read_on()
            except asyncio.CancelledError:
                deadline.check()
                raise
            finally:
                deadline.end()
        check_complete(self._size, declared)
        return await digest(self._hasher, self._size, self._rules)

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


class Deadline:
    """Cancels whoever waits for a body that comes too slowly. Every request needs one, and it is cheap."""

    def __init__(self, rules: Rules) -> None:
        self._over = False
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(rules.patience, self._cancel)

    def _cancel(self) -> None:
        self._over = self._task is not None and self._task.cancel()

    def check(self) -> None:
        """After a cancellation: raise ``Problem`` if it came from here, and from nowhere else."""
        if self._over and self._task is not None and self._task.uncancel() == 0:
            raise Problem("request-timeout", "Send the same request with the same key again.") from None

    def end(self) -> None:
        """The body is there."""
        self._timer.cancel()


# -- Parts of it ---------------------------------------------------------------------------------------------------


def hasher_of(scope: Any, rules: Rules) -> Hasher:
    """What takes in what a request asks."""
    path = scope.get("raw_path") or scope["path"].encode()
    return Hasher(scope["method"], path.partition(b"?")[0], scope["query_string"], rules.fingerprint)


def declared_length(scope: Any, rules: Rules) -> int | None:
    """How long the body says that it is. Raises ``Problem`` if that is too long."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            length = int(value[:19])  # of more digits than any body has, the first are enough to refuse it
            check_size(length, rules)
            return length
    return None


def check_size(size: int, rules: Rules) -> None:
    """Refuse a body that is too large."""
    if size > rules.max_request:
        raise Problem("request-too-large", f"A body may have {rules.max_request} bytes.")


def check_complete(size: int, declared: int | None) -> None:
    """Refuse a body that was cut short, where a server lets it pass as complete."""
    if declared is not None and size != declared:
        raise Problem("request-incomplete", "Send the same request with the same key again.")


async def digest(hasher: Hasher, size: int, rules: Rules) -> bytes:
    """What was asked. A large JSON document is read apart, so that nobody waits for it."""
    if size > PIECE and rules.fingerprint == "json":
        return await asyncio.to_thread(hasher.digest)
    return hasher.digest()


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
