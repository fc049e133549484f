"""Every rule of the HTTP boundary on Flask, over real sockets."""

from __future__ import annotations

from tests.http.rules import HttpRules
from tests.http.servers import sites

site = sites("flask-gunicorn")


class TestFlask(HttpRules):
    """The app of ``apps/flask_app.py``."""
