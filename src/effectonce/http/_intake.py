"""A request's body on its way in: counted, hashed, and held for the app to read, in memory or on the disk.

For adapters that read by asking for so many bytes. Nothing passes because it is large, slow or cut short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from os import SEEK_END
from tempfile import SpooledTemporaryFile
from typing import IO, Any

from ._exchange import Hasher, Problem
from ._rules import Rules

IN_MEMORY = 1 << 20
"""A longer body waits on the disk for the app to read it."""
PIECE = 1 << 16


def take_in_from(
    environ: dict[str, Any], rules: Rules, hasher: Hasher, monotonic: Callable[[], float]
) -> IO[bytes]:
    """Read the body of a WSGI request, and put it where the app will look for it."""
    length = _declared_length(environ)
    body = take_in(environ["wsgi.input"].read, length, rules, hasher, monotonic)
    if length is None:  # it has no chunks any more
        environ["CONTENT_LENGTH"] = str(body.seek(0, SEEK_END))
        environ.pop("HTTP_TRANSFER_ENCODING", None)
        body.seek(0)
    environ["wsgi.input"], environ["wsgi.input_terminated"] = body, True
    return body


def _declared_length(environ: Mapping[str, Any]) -> int | None:
    """How long a WSGI request's body is; None if it ends by itself. Raises ``Problem`` if nobody can tell."""
    declared = environ.get("CONTENT_LENGTH") or ""
    if declared.isdecimal():
        return int(declared)
    has_chunks = "HTTP_TRANSFER_ENCODING" in environ
    if environ.get("wsgi.input_terminated") and not (has_chunks and _hides_cuts(environ)):
        return None
    # An app may know how to get at a body that we would not have seen.
    if has_chunks:
        raise Problem("length-required", "Send this request with a Content-Length.")
    return 0


def _hides_cuts(environ: Mapping[str, Any]) -> bool:
    """Whether the server lets a body in chunks that was cut off pass as complete. Others raise an error."""
    return bool(environ.get("SERVER_SOFTWARE") == "Granian")


class OnDemand:
    """A body that is taken in when it is asked for: by the boundary, or before by a scope function that reads it.

    It stands where such a function looks for the body, and what was taken in is there again for the app.
    """

    def __init__(self, take_in: Callable[[], IO[bytes]]) -> None:
        self._take_in = take_in
        self._taken: IO[bytes] | None = None
        self._error: Exception | None = None

    def taken(self) -> IO[bytes]:
        """The body. What it is refused for, it is refused for again, though a function has caught it."""
        if self._error is not None:
            raise self._error
        if self._taken is None:
            try:
                self._taken = self._take_in()
            except Exception as error:
                self._error = error
                raise
        return self._taken

    def close(self) -> None:
        """Let go of what was taken in."""
        if self._taken is not None:
            self._taken.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.taken(), name)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.taken())


def take_in(
    read: Callable[[int], bytes],
    length: int | None,
    rules: Rules,
    hasher: Hasher,
    monotonic: Callable[[], float],
) -> IO[bytes]:
    """Read a body of a declared length, or to its end. Raises ``Problem`` for one that can't be taken in whole.

    A read that blocks can't be interrupted: time is looked at between two pieces, and the rest is the server's matter.
    """
    spool = SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 - the caller closes it
    try:
        _fill(spool, read, length, rules, hasher, monotonic)
    except BaseException:
        spool.close()
        raise
    return spool


def _fill(
    spool: IO[bytes],
    read: Callable[[int], bytes],
    length: int | None,
    rules: Rules,
    hasher: Hasher,
    monotonic: Callable[[], float],
) -> None:
    size, deadline = 0, monotonic() + rules.patience
    while length is None or size < length:
        if max(size, length or 0) > rules.max_request:
            raise Problem("request-too-large", f"A body may have {rules.max_request} bytes.")
        if monotonic() > deadline:
            raise Problem("request-timeout", "Send the same request with the same key again.")
        piece = read(PIECE if length is None else min(PIECE, length - size))
        if not piece:
            break
        size += len(piece)
        hasher.update(piece)
        spool.write(piece)
    if length is not None and size < length:
        raise Problem("request-incomplete", "Send the same request with the same key again.")
    spool.seek(0)


def whole(body: IO[bytes]) -> bytes:
    """All of a body, which can be read again afterwards."""
    content = body.read()
    body.seek(0)
    return content
