"""The app under test on Starlette, with a BaseHTTPMiddleware between the boundary and the handlers."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from tests.http.apps.bare_asgi import asked
from tests.http.apps.kitchen import Dish, boundary, cook, open_receiver

from effectonce.http.asgi import IdempotencyMiddleware


async def answer(request: Request) -> Response:
    dish = await asyncio.to_thread(cook, *asked(request.scope), await request.body())
    # Not every server leaves out a body where none may be.
    return as_response(dish._replace(body=b"") if request.method == "HEAD" else dish)


def as_response(dish: Dish) -> Response:
    kind, content = (Response, dish.body) if dish.pieces is None else (StreamingResponse, dish.pieces)
    response: Response = kind(content, dish.status)
    given = [pair for pair in response.raw_headers if pair[0] == b"content-length"]
    said = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in dish.headers]
    response.raw_headers = said if dict(said).get(b"content-length") else said + given
    return response


class Between(BaseHTTPMiddleware):
    """Takes every response apart and hides what happens to the client."""

    async def dispatch(self, request: Request, call_next: Any) -> Any:
        response = await call_next(request)
        response.headers["x-between"] = "yes"
        return response


METHODS = ["GET", "HEAD", "OPTIONS", "POST", "PATCH", "PUT", "DELETE"]

application = Starlette(
    routes=[Route("/{path:path}", answer, methods=METHODS)],
    middleware=[
        Middleware(IdempotencyMiddleware, receiver=open_receiver(), **boundary()),
        Middleware(Between),
    ],
)
