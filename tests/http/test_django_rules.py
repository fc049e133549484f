"""Every rule of the HTTP boundary on Django, over real sockets, in both of its colours."""

from __future__ import annotations

from tests.http.rules import HttpRules
from tests.http.servers import sites

ONE_LINE = "repeated headers"
site = sites(
    "django-gunicorn",
    "django-runserver",
    "django-uvicorn",
    "django-uvicorn-threads",
    "django-uvicorn-mixed",
    lacks={
        "django-gunicorn": [ONE_LINE],
        "django-runserver": [ONE_LINE, "chunked"],
        "django-uvicorn": [ONE_LINE, "early refusal"],
        "django-uvicorn-threads": [ONE_LINE, "early refusal"],
        "django-uvicorn-mixed": [ONE_LINE, "early refusal"],
    },
)


class TestDjango(HttpRules):
    """The app of ``apps/django_app.py`` and ``apps/django_async.py``."""
