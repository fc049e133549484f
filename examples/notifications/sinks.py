"""Who gets the notifications: a mail server, and the APIs of two providers, which count what they keep.

``python sinks.py 8000`` serves them; ``GET /`` tells what each has kept, and how many repetitions it dropped.
"""

from __future__ import annotations

import json
import socketserver
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from channels import CHANNELS, SMTP_PORT


class Mailbox:
    """What came, by its key. A key that comes again is the same notification."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: set[str] = set()
        self._repeats = 0

    def put(self, key: str) -> None:
        with self._lock:
            self._repeats += key in self._kept
            self._kept.add(key)

    def counts(self) -> dict[str, int]:
        with self._lock:
            return {"kept": len(self._kept), "repeats": self._repeats}


BOXES = {channel: Mailbox() for channel in CHANNELS}


class Mail(socketserver.StreamRequestHandler):
    """As much of SMTP as a client needs to hand over a letter."""

    def handle(self) -> None:
        self._say("220 sink")
        while line := self.rfile.readline():
            word = line.strip().upper()
            if word == b"DATA":
                self._say("354 go on")
                self._keep()
            elif word == b"QUIT":
                self._say("221 bye")
                return
            self._say("250 ok")

    def _keep(self) -> None:
        key = ""
        while (line := self.rfile.readline()).strip() != b".":
            if not line:  # it broke off in the middle: this is no letter
                return
            if line.lower().startswith(b"message-id:"):
                key = line.partition(b":")[2].strip().decode()
        BOXES["email"].put(key)

    def _say(self, text: str) -> None:
        self.wfile.write(f"{text}\r\n".encode())


class Api(BaseHTTPRequestHandler):
    """The providers."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        BOXES[self.path.strip("/")].put(self.headers["Idempotency-Key"])
        self._answer(b"{}")

    def do_GET(self) -> None:
        self._answer(json.dumps({channel: box.counts() for channel, box in BOXES.items()}).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


class MailServer(socketserver.ThreadingTCPServer):
    """A thread for each client, of whom many may come at once."""

    daemon_threads = allow_reuse_address = True
    request_queue_size = 128


class ApiServer(ThreadingHTTPServer):
    """The same."""

    request_queue_size = 128


def serve(smtp_port: int, http_port: int) -> tuple[int, int]:
    """Begin to serve; the ports, which are free ones where 0 was asked for."""
    mail = MailServer(("127.0.0.1", smtp_port), Mail)
    api = ApiServer(("127.0.0.1", http_port), Api)
    for server in (mail, api):
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return mail.server_address[1], api.server_address[1]


if __name__ == "__main__":
    serve(SMTP_PORT, int(sys.argv[1]))
    threading.Event().wait()
