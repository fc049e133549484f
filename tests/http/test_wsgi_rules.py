"""Every rule of the HTTP boundary on bare WSGI, over real sockets: gunicorn with processes and threads, and granian."""

from __future__ import annotations

from tests.http.rules import HttpRules
from tests.http.servers import sites

site = sites("gunicorn-sync", "gunicorn-gthread", "granian", lacks={"granian": ["chunked"]})


class TestWsgi(HttpRules):
    """The app of ``apps/plain.py``."""
