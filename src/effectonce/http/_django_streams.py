"""Streams of Django's responses in either colour, and what a thread under ASGI waits for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

from .._asyncio import apart
from ..errors import MissingExtra
from ._boundary import Exchange

try:
    from asgiref.sync import async_to_sync, sync_to_async
except ImportError as error:
    raise MissingExtra("effectonce.http.django needs Django: pip install 'effectonce[django]'.") from error


def to_its_end(function: Callable[..., Any], *args: Any) -> Any:
    """Await something in a thread of an ASGI stack, for as long as it takes.

    When a client leaves, Django cancels, and asgiref hands that on to what its threads wait for. It ends here: the view
    goes on, and this thread, which the view may need, waits for it as ever.
    """

    async def shielded() -> Any:
        return await apart(function(*args))

    return async_to_sync(shielded)()


def chained(exchange: Exchange, held: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    """What was held of a stream, and what comes: it knows its attempt to its end."""
    yield held
    while True:
        with exchange.at_work():
            piece = next(rest, None)
        if piece is None:
            return
        yield piece


async def chained_later(exchange: Exchange, held: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield held
    while True:
        with exchange.at_work():
            piece = await anext(rest, None)
        if piece is None:
            return
        yield piece


def at_once(stream: AsyncIterator[bytes]) -> Iterator[bytes]:
    """All of an async stream, where there is no loop to go on with; not before its first piece is asked for."""
    yield from async_to_sync(_all_of)(stream)


async def awaited(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def read_now(stream: Any) -> Iterable[bytes] | AsyncIterator[bytes]:
    """The same stream, but all of it is there."""
    return awaited(to_its_end(_all_of, stream)) if isinstance(stream, AsyncIterator) else list(stream)


async def _all_of(pieces: AsyncIterator[bytes]) -> list[bytes]:
    return [piece async for piece in pieces]


async def in_threads(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The pieces of a stream that blocks."""
    step: Any = sync_to_async(next)
    while (piece := await step(pieces, None)) is not None:
        yield piece
