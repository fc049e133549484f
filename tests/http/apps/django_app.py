"""The app under test in Django, behind WSGI. ``django_async`` has it behind ASGI, its view in the other colour."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.urls import path
from tests.http.apps.kitchen import Dish, cook

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.http.apps.django_settings")


def handle(request: HttpRequest, rules: str, what: str) -> Any:
    return as_response(cook(what, request.GET["n"], request.body))


def as_response(dish: Dish) -> Any:
    kind: Callable[..., Any] = HttpResponse if dish.pieces is None else StreamingHttpResponse
    response = kind(dish.body if dish.pieces is None else dish.pieces, status=dish.status)
    for name, value in dish.headers:
        if name == "Set-Cookie":
            cookie, _, content = value.partition(";")[0].partition("=")
            response.set_cookie(cookie, content)
        else:
            response[name] = value
    return response


urlpatterns = [path("<str:rules>/<str:what>", handle)]
application = get_wsgi_application()
