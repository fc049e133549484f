"""The body of a response that comes piece by piece."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx


class Pieces(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A stream for both colours that may break, and knows whether it was closed."""

    def __init__(self, pieces: Any) -> None:
        self.pieces, self.closed = pieces, False

    def __iter__(self) -> Iterator[bytes]:
        for piece in self.pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.closed = True
