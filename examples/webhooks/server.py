"""Takes the webhooks of two providers: each event is booked once, however often it is delivered."""

from __future__ import annotations

import json
import os
import socketserver
import sqlite3
import sys
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from effectonce import EffectOnceError, KeyReused, Policy, Receiver, current
from effectonce.http.webhooks import Event, GitHub, Stripe, WebhookRefused, Webhooks

LEDGER = "ledger.db"
SCHEMA = "CREATE TABLE IF NOT EXISTS lines (id TEXT PRIMARY KEY, event TEXT NOT NULL, what TEXT NOT NULL)"

# A killed server's events are free again after the lease; until then the provider is told to come back.
receiver = Receiver(os.environ.get("EFFECTONCE_STORE", "sqlite:///effects.db"), policy=Policy(lease="3s"))
SCHEMES = {
    "/hooks/stripe": Stripe(os.environ.get("STRIPE_SECRET", "whsec_example")),
    "/hooks/github": GitHub(os.environ.get("GITHUB_SECRET", "example")),
}
HOOKS = {path: Webhooks(receiver, scheme, endpoint=path) for path, scheme in SCHEMES.items()}


def book(event: Event) -> dict[str, str]:
    """The effect: a line in the ledger. What it returns is the answer to every delivery of the event."""
    # Killed right after this, the next delivery runs it again: the line has the same id then, and is not there twice.
    line = (current().key_for("ledger"), event.id, event.kind)
    with sqlite3.connect(LEDGER, timeout=30) as ledger:
        ledger.execute("INSERT INTO lines VALUES (?, ?, ?) ON CONFLICT (id) DO NOTHING", line)
    return {"booked": event.id}


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """POST /hooks/stripe and /hooks/github take events; GET /books says how often each was booked."""
    if environ["REQUEST_METHOD"] == "GET":
        with sqlite3.connect(LEDGER, timeout=30) as ledger:
            counted = ledger.execute("SELECT event, count(*) FROM lines GROUP BY event ORDER BY event")
            return answer(start_response, "200 OK", dict(counted.fetchall()))
    if environ["PATH_INFO"] not in HOOKS:
        return answer(start_response, "404 Not Found", {"error": "There is no such hook."})
    body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"] or 0))
    try:
        outcome = HOOKS[environ["PATH_INFO"]].process(headers_of(environ), body, book)
    except WebhookRefused as refused:
        # A wrong signature, or no event: nothing ran, and the text is fit to be sent.
        return answer(start_response, f"{refused.status} Refused", {"error": str(refused)})
    except KeyReused:  # the same id with another content: coming again would not help
        return answer(
            start_response, "422 Refused", {"error": "This event was sent before with another content."}
        )
    except EffectOnceError:  # running elsewhere, or the store is away: a provider comes again after a 5xx
        return answer(start_response, "503 Later", {"error": "Send it again."})
    return answer(start_response, "200 OK", outcome.value, ("X-Replayed", str(outcome.replayed).lower()))


def headers_of(environ: dict[str, Any]) -> dict[str, str]:
    """The request's headers by their names."""
    return {name[5:].replace("_", "-"): value for name, value in environ.items() if name.startswith("HTTP_")}


def answer(
    start_response: Callable[..., Any], status: str, document: Any, *more: tuple[str, str]
) -> list[bytes]:
    """A response with a JSON document."""
    body = json.dumps(document).encode()
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), *more]
    start_response(status, headers)
    return [body]


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
    with make_server("127.0.0.1", port, app, Server, Quiet) as server:
        server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
