"""Client sessions: the Idempotent Receiver in its first form, where the server keeps a bounded memory for each client.

A client registers and gets an id. It numbers its requests, sends any of them again under the same number, and tells
with each which answers it has. The server runs each number once, answers repeats, and forgets what is acknowledged: it
remembers at most a window of requests for each client, however many were sent, and needs no time to keep them for::

    sessions = Sessions(Receiver("sqlite:///effects.db"))
    opened = sessions.open(scope="ada")
    client = ClientSession(opened)

    with client.request({"cents": 500}) as request:
        outcome = sessions.process(request, charge, scope="ada")

``ClientSession`` counts, on the client's side; ``Journal`` makes its numbers survive a restart. ``Request.headers`` and
``Request.from_headers`` carry a request's place over HTTP and in messages.
"""

from __future__ import annotations

from ._client import ClientSession
from ._journal import Entry, Journal
from ._request import Opened, Request
from ._server import Sessions

__all__ = ["ClientSession", "Entry", "Journal", "Opened", "Request", "Sessions"]
