"""The app under test as bare WSGI."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs

from tests.http.apps.kitchen import boundary, cook, open_receiver

from effectonce.http.wsgi import IdempotencyMiddleware


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    what = environ["PATH_INFO"].rpartition("/")[2]
    name = parse_qs(environ["QUERY_STRING"])["n"][0]
    dish = cook(what, name, environ["wsgi.input"].read())
    start_response(f"{dish.status} Whatever", dish.headers)
    return [dish.body] if dish.pieces is None else dish.pieces


application = IdempotencyMiddleware(app, open_receiver(), **boundary())
