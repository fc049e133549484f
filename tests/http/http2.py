"""The client's side of a server under test that speaks HTTP/2: a connection for each request, without TLS."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from contextlib import suppress

import h2.config
import h2.connection
import h2.events
from tests.http.site import Pairs, Reply, Site
from tests.http.world import PATIENCE_SECONDS

RECEIVE_BYTES = 65_536
# The test says what is sent, right or wrong; the server is what is under test.
CONFIG = h2.config.H2Configuration(
    client_side=True, header_encoding="latin-1", validate_outbound_headers=False
)


class Pending:
    """A request on a stream of its own connection."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, PATIENCE_SECONDS)
        self._protocol = h2.connection.H2Connection(CONFIG)
        self._protocol.initiate_connection()
        self._headers: list[tuple[str, str]] = []
        self._body = b""
        self._ended = False

    def ask(self, headers: Pairs, body: bytes, *, ends: bool) -> None:
        """Send a request; one that does not end has more to say, and never says it."""
        self._protocol.send_headers(1, headers, end_stream=ends and not body)
        self._flush()
        while body and not self._ended:
            room = min(self._protocol.local_flow_control_window(1), self._protocol.max_outbound_frame_size)
            if room == 0:
                self._listen()
                continue
            piece, body = body[:room], body[room:]
            self._protocol.send_data(1, piece, end_stream=ends and not body)
            self._flush()

    def reply(self) -> Reply:
        """Wait for the answer, all of it."""
        with self._socket:
            while not self._ended:
                self._listen()
        (_, status), *headers = self._headers
        return Reply(int(status), headers, self._body)

    def peek(self, size: int) -> bytes:
        """Wait for the first bytes of the answer, as HTTP/1.1 would spell them."""
        while not self._headers:
            self._listen()
        return f"HTTP/1.1 {self._headers[0][1]} ...".encode()[:size]

    def vanish(self) -> None:
        """Go away without a word."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def reset(self) -> None:
        """Take the request back, and stay connected."""
        self._protocol.reset_stream(1)
        self._flush()

    def _listen(self) -> None:
        data = self._socket.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionError("the server closed the connection before the answer was complete")
        for event in self._protocol.receive_data(data):
            match event:
                case h2.events.ResponseReceived():
                    self._headers = [(str(name), str(value)) for name, value in event.headers or ()]
                case h2.events.DataReceived():
                    self._body += event.data or b""
                    self._protocol.acknowledge_received_data(event.flow_controlled_length or 0, 1)
                case h2.events.StreamEnded():
                    self._ended = True
                case h2.events.StreamReset() | h2.events.ConnectionTerminated() if not self._ended:
                    raise ConnectionError(f"the server took the request back: {event}")
        self._flush()

    def _flush(self) -> None:
        # A server may have answered, and closed, before it has read everything: what it said is still to be heard.
        with suppress(ConnectionError):
            self._socket.sendall(self._protocol.data_to_send())


class Http2Site(Site):
    """A server that is spoken to in HTTP/2."""

    def begin(  # type: ignore[override]
        self,
        method: str,
        path: str,
        headers: Pairs = (),
        body: bytes = b"",
        *,
        chunks: Iterable[bytes] | None = None,
        length: int | None = None,
    ) -> Pending:
        """Send a request: without a length, if there are chunks; or with a length that it need not have."""
        body = b"".join(chunks or (body,))
        start = [(":method", method), (":scheme", "http"), (":authority", self.host), (":path", path)]
        if chunks is None:
            start.append(("content-length", str(len(body) if length is None else length)))
        pending = Pending((self.host, self.port))
        said = [(name.lower(), value.strip()) for name, value in headers]
        pending.ask(start + said, body, ends=length is None)
        return pending
