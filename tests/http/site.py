"""The client's side of a server under test: requests as they are on the wire, headers line by line."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from http.client import HTTPConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

from tests.http.world import PATIENCE_SECONDS, World

Pairs = Sequence[tuple[str, str]]


class Reply(NamedTuple):
    """A response; headers in order, repeated ones as often as they came, names in lower case."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def all(self, name: str) -> list[str]:
        """Every line of a header."""
        return [value for header, value in self.headers if header == name]

    def one(self, name: str) -> str | None:
        """The only line of a header, if there is any."""
        lines = self.all(name)
        assert len(lines) < 2, f"{name} came {len(lines)} times"
        return lines[0] if lines else None

    @property
    def replayed(self) -> bool:
        """Whether it says that it was given before."""
        return self.one("x-idempotency-replayed") == "true"

    @property
    def code(self) -> str | None:
        """The kind of problem that it tells of."""
        return self.problem["code"] if self.one("content-type") == "application/problem+json" else None

    @property
    def problem(self) -> dict[str, Any]:
        """The members of a problem document."""
        members: dict[str, Any] = json.loads(self.body)
        return members


class Pending:
    """A request that was sent and not yet answered."""

    def __init__(self, connection: HTTPConnection) -> None:
        self._connection = connection

    def reply(self) -> Reply:
        """Wait for the answer, all of it."""
        try:
            response = self._connection.getresponse()
            body = response.read()
        finally:
            self._connection.close()
        headers = [(name.lower(), value) for name, value in response.getheaders()]
        return Reply(response.status, headers, body)

    def size(self) -> int:
        """Wait for the answer, and give its size only."""
        try:
            response = self._connection.getresponse()
            return sum(map(len, iter(lambda: response.read(1 << 20), b"")))
        finally:
            self._connection.close()

    def peek(self, size: int) -> bytes:
        """Wait for the first bytes of the answer."""
        assert self._connection.sock is not None
        return self._connection.sock.recv(size, socket.MSG_WAITALL)

    def vanish(self) -> None:
        """Go away without a word, so that whoever writes to this connection meets an error."""
        assert self._connection.sock is not None
        self._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._connection.close()


class Site:
    """A server under test, and the world that its handlers act on.

    ``lacks`` names what its framework can't do, and the rules leave that out: "repeated headers" (a response has one
    line for each), "types" (it hides a handler's exception), "chunked" (it can't read such bodies), "early refusal" (it
    reads bodies before anybody may refuse them).
    """

    def __init__(self, url: str, world: World, lacks: Iterable[str] = ()) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self.url, self.host, self.port, self.world = url, parts.hostname, parts.port, world
        self.lacks = frozenset(lacks)

    def new(self, start: str = "") -> str:
        """A name that no other test has, for a key and for an effect."""
        return f"{start}{uuid4().hex[:16]}"

    def begin(
        self,
        method: str,
        path: str,
        headers: Pairs = (),
        body: bytes = b"",
        *,
        chunks: Iterable[bytes] | None = None,
        length: int | None = None,
    ) -> Pending:
        """Send a request: in chunks, if there are any; or with a length that it need not have."""
        connection = HTTPConnection(self.host, self.port, timeout=PATIENCE_SECONDS)
        connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in headers:
            connection.putheader(name, value)
        if chunks is not None:
            connection.putheader("Transfer-Encoding", "chunked")
        else:
            connection.putheader("Content-Length", str(len(body) if length is None else length))
        connection.endheaders()
        with suppress(ConnectionError):  # a server may answer, and close, before it has read all
            for chunk in chunks or ():
                connection.send(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            connection.send(body if chunks is None else b"0\r\n\r\n")
        return Pending(connection)

    def send(
        self,
        method: str,
        path: str,
        headers: Pairs = (),
        body: bytes = b"",
        *,
        chunks: Iterable[bytes] | None = None,
        length: int | None = None,
    ) -> Reply:
        """Send a request and wait for its answer."""
        return self.begin(method, path, headers, body, chunks=chunks, length=length).reply()

    def post(self, path: str, key: str, body: bytes = b"", *headers: tuple[str, str]) -> Reply:
        """Send a POST with a key, which is the name of its effect as well."""
        return self.begin_post(path, key, body, *headers).reply()

    def begin_post(self, path: str, key: str, body: bytes = b"", *headers: tuple[str, str]) -> Pending:
        """``post``, without waiting for the answer."""
        return self.begin("POST", f"{path}?n={key}", [("Idempotency-Key", f'"{key}"'), *headers], body)

    def twice(self, path: str, key: str, body: bytes = b"") -> tuple[Reply, Reply]:
        """The answers to a POST and to a repeat of it."""
        return self.post(path, key, body), self.post(path, key, body)
