"""The app under test in Django, behind ASGI: with a view that is a coroutine, with the plain one, and in threads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from typing import Any

os.environ["DJANGO_SETTINGS_MODULE"] = "tests.http.apps.django_settings"

from django.conf import settings
from django.core.asgi import get_asgi_application
from django.http import HttpRequest
from django.urls import path
from tests.http.apps import django_app
from tests.http.apps.kitchen import cook


async def handle(request: HttpRequest, rules: str, what: str) -> Any:
    dish = await asyncio.to_thread(cook, what, request.GET["n"], request.body)
    return django_app.as_response(
        dish if dish.pieces is None else dish._replace(pieces=one_by_one(dish.pieces))
    )


async def one_by_one(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


urlpatterns = [path("<str:rules>/<str:what>", handle)]


def application() -> Any:
    """With a view that is a coroutine."""
    settings.ROOT_URLCONF = __name__
    return get_asgi_application()


def threaded() -> Any:
    """With a plain view, which Django runs in a thread."""
    return get_asgi_application()


def mixed() -> Any:
    """With a view that is a coroutine, below a middleware that knows no event loop: so the boundary is in a thread."""
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.knows_no_loop"]
    return application()


def knows_no_loop(get_response: Any) -> Any:
    return lambda request: get_response(request)
