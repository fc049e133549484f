"""A service that books payments, for clients that number their requests."""

from __future__ import annotations

import json
import os
import socketserver
import sqlite3
import sys
from collections.abc import Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from effectonce import Receiver, current
from effectonce.http.sessions import WSGISessionMiddleware
from effectonce.sessions import Sessions

LEDGER = "ledger.db"
SCHEMA = (
    "CREATE TABLE IF NOT EXISTS lines (invoice TEXT NOT NULL, cents INTEGER NOT NULL, request TEXT NOT NULL)"
)


def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    """POST /payments books a line; GET /books says how often each invoice was paid."""
    with sqlite3.connect(LEDGER, timeout=30) as ledger:
        if environ["REQUEST_METHOD"] == "GET":
            counted = ledger.execute("SELECT invoice, count(*) FROM lines GROUP BY invoice ORDER BY invoice")
            return answer(start_response, "200 OK", dict(counted.fetchall()))
        payment = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        # Nothing in the ledger would keep a line from being there twice.
        line = (payment["invoice"], payment["cents"], current().key)
        ledger.execute("INSERT INTO lines VALUES (?, ?, ?)", line)
    return answer(start_response, "201 Created", {"invoice": payment["invoice"], "paid": payment["cents"]})


def answer(start_response: Any, status: str, document: Any) -> list[bytes]:
    """A response with a JSON document."""
    body = json.dumps(document).encode()
    start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
    return [body]


def caller(request: Any) -> str | None:
    """Whose sessions these are: an API would look at the credentials."""
    name: str | None = request.headers.get("x-merchant")
    return name


class Server(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each connection."""

    daemon_threads = True


class Quiet(WSGIRequestHandler):
    """Says nothing of each request."""

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def main(port: int) -> None:
    """Serve until somebody ends it."""
    with sqlite3.connect(LEDGER) as ledger:
        ledger.execute(SCHEMA)
    receiver = Receiver(os.environ.get("EFFECTONCE_STORE", "sqlite:///effects.db"))
    sessions = Sessions(receiver, lease="24h")
    covered = WSGISessionMiddleware(app, receiver, scope=caller, sessions=sessions)
    with make_server("127.0.0.1", port, covered, Server, Quiet) as server:
        server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
