"""The app under test as bare ASGI."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import parse_qs

from tests.http.apps.kitchen import Dish, boundary, cook, open_receiver

from effectonce.http.asgi import IdempotencyMiddleware


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await live(receive, send)
        return
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    await serve(await asyncio.to_thread(cook, *asked(scope), body), send)


def asked(scope: Any) -> tuple[str, str]:
    """What a request wants to be cooked, and the name of its effect."""
    return scope["path"].rpartition("/")[2], parse_qs(scope["query_string"].decode())["n"][0]


async def serve(dish: Dish, send: Any) -> None:
    # ASGI promises no more of headers than that they can be iterated over.
    headers = ((name.encode("latin-1"), value.encode("latin-1")) for name, value in dish.headers)
    await send({"type": "http.response.start", "status": dish.status, "headers": headers})
    for piece in dish.pieces or ():
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": dish.body})


async def live(receive: Any, send: Any) -> None:
    """The life of an app that needs nothing to begin or to end."""
    while True:
        word = (await receive())["type"]
        await send({"type": f"{word}.complete"})
        if word == "lifespan.shutdown":
            return


application = IdempotencyMiddleware(app, open_receiver(), **boundary())
