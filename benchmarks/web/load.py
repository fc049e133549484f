"""A client that keeps a web server busy: some connections that stay open, one request at a time on each.

It is one loop over raw sockets, because the server is to be measured: a client library would cost more than it.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterable
from contextlib import ExitStack

HOST = "127.0.0.1"
BODY = b'{"order":"o-10001","cents":1999,"currency":"EUR","customer":"c-10001","note":"thank you for your order"}'
SILENCE_SECONDS = 30.0
STATUS = len(b"HTTP/1.1 200")
"""Bytes of an answer that tell its status."""


def post(key: str) -> bytes:
    """A request with a key."""
    return (
        b"POST /payments HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: load\r\nAccept: */*\r\nX-Caller: c-10001\r\n"
        b'Content-Type: application/json\r\nIdempotency-Key: "%b"\r\nContent-Length: %d\r\n\r\n%b'
        % (key.encode("ascii"), len(BODY), BODY)
    )


GET = b"GET /payments HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: load\r\nAccept: */*\r\nX-Caller: c-10001\r\n\r\n"


RUNS = GET.replace(b"/payments", b"/runs")


class Load:
    """Open connections to a server."""

    def __init__(self, port: int, connections: int) -> None:
        with ExitStack() as stack:
            self._sockets = {}
            for _ in range(connections):
                connection = stack.enter_context(socket.create_connection((HOST, port), SILENCE_SECONDS))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets[connection.fileno()] = connection
            self._close = stack.pop_all().close
        self._poll = select.epoll()
        for number in self._sockets:
            self._poll.register(number, select.EPOLLIN)

    def send(self, requests: Iterable[bytes]) -> list[bytes]:
        """Have every request answered, as many at once as there are connections. Refuses any answer but 2xx.

        Gives the last answers, one of each connection that was used.
        """
        coming, partial, last = iter(requests), dict[int, bytes](), dict[int, bytes]()
        sockets, known = self._sockets, (-1, b"")  # the size of the last answer, and how it began
        for number, request in zip(sockets, coming, strict=False):
            sockets[number].sendall(request)
            partial[number] = b""
        while partial:
            ready = self._poll.poll(SILENCE_SECONDS)
            if not ready:
                raise TimeoutError(f"no answer for {SILENCE_SECONDS} s")
            for number, _ in ready:
                connection = sockets[number]
                reply = partial[number] + connection.recv(65536)
                if (
                    len(reply),
                    reply[:STATUS],
                ) != known:  # most are alike; a piece of a longer one would be heard of
                    if not _is_complete(reply):
                        partial[number] = reply
                        continue
                    known = (len(reply), reply[:STATUS])
                if request := next(coming, b""):
                    partial[number] = b""
                    connection.send(request)
                else:
                    last[number] = reply
                    del partial[number]
        return list(last.values())

    def close(self) -> None:
        """Close the connections."""
        self._poll.close()
        self._close()


def _is_complete(reply: bytes) -> bool:
    if not reply:
        raise ConnectionError("the server has closed a connection")
    head, found, body = reply.partition(b"\r\n\r\n")
    if not found:
        return False
    if not head.startswith(b"HTTP/1.1 2"):
        raise ConnectionError(f"the server answers {reply[:200]!r}")
    head = head.lower()
    if b"transfer-encoding: chunked" in head:
        return body.endswith(b"0\r\n\r\n")
    _, _, length = head.partition(b"content-length: ")
    return len(body) >= int(length.partition(b"\r\n")[0])
