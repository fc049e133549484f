"""The bare app, in a world that is worse than the others: servers that cancel, sends that fail, handlers that die.

The header ``X-Break`` says what breaks between the server and the boundary: ``send`` makes every send fail, ``cancel``
cancels the request as soon as its effect has happened. The store may be any; everything that is logged is written out.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

from tests.http.apps.bare_asgi import app, asked, live
from tests.http.apps.extremes import BODY_SECONDS, HEADER_BYTES, PIECE_BYTES, STORE
from tests.http.apps.kitchen import MENU, ROUTES, TEXT, Dish, caller, open_receiver
from tests.http.world import FOLDER

from effectonce import Policy, Receiver
from effectonce.hooks import log_events
from effectonce.http import Request, Route
from effectonce.http.asgi import IdempotencyMiddleware
from effectonce.testing.clocks import wait_until


def _die(number: int, body: bytes) -> Dish:
    """The effect has happened, and nobody will ever hear of it."""
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return Dish(200, [TEXT], b"number %d" % number)


def _long_headers(number: int, body: bytes) -> Dish:
    return Dish(200, [TEXT, *((f"X-Long-{at}", "y" * 1000) for at in range(HEADER_BYTES // 1000))], b"long")


def _secrets(number: int, body: bytes) -> Dish:
    if b"raise" in body:
        raise RuntimeError("the handler has a bug")
    return Dish(200, [TEXT, ("Set-Cookie", "session=s3cr3t-cookie")], b"s3cr3t-answer")


MENU.update({"die": _die, "long-headers": _long_headers, "secrets": _secrets})

HASTY = [
    Route("/hasty/**", body_timeout=BODY_SECONDS, max_request=1 << 20),
    Route("/flood/**", max_new_keys=3),
    Route("/storm/**", busy="wait"),
    # A crash is found out by the end of a lease.
    Route("/crash/**", busy="wait", policy=Policy(lease=1.0)),
    Route("/crash-once/**", busy="wait", policy=Policy(lease=1.0, on_crash="in_doubt")),
]

logging.basicConfig(level=logging.DEBUG)
logging.getLogger("asyncio").setLevel(logging.INFO)


def _receiver() -> Receiver:
    url = os.environ.get(STORE)
    receiver = open_receiver() if url is None else Receiver(url)
    receiver.events.hooks = (log_events,)
    return receiver


def _whose(request: Request) -> str:
    """The caller's name; or, as people do who have none, all of its credentials."""
    return request.headers.get("authorization") or caller(request)


async def streaming(scope: Any, receive: Any, send: Any) -> None:
    """``sink`` reads a body and forgets it, ``spring`` answers as many bytes as it is asked for; all others cook."""
    what, wanted = asked(scope)
    start = {"type": "http.response.start", "status": 200, "headers": []}
    if what == "sink":
        size, more = 0, True
        while more:
            message = await receive()
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        await send(start)
        await send({"type": "http.response.body", "body": b"%d" % size})
    elif what == "spring":
        await send(start)
        for _ in range(int(wanted) // PIECE_BYTES):
            await send({"type": "http.response.body", "body": bytes(PIECE_BYTES), "more_body": True})
        await send({"type": "http.response.body"})
    else:
        await app(scope, receive, send)


covered = IdempotencyMiddleware(streaming, _receiver(), scope=_whose, routes=HASTY + ROUTES)


async def application(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await live(receive, send)
        return
    fault = dict(scope["headers"]).get(b"x-break", b"")
    if fault == b"send":

        async def failing_send(_: Any) -> None:
            raise ConnectionResetError("the client is gone")

        await covered(scope, receive, failing_send)
    elif fault == b"cancel":
        await _cancelled(scope, receive, send)
    else:
        await covered(scope, receive, send)


async def _cancelled(scope: Any, receive: Any, send: Any) -> None:
    """Serve a request until the test says so, then cancel it as a server does that has lost its client."""
    running = asyncio.ensure_future(covered(scope, receive, send))
    word = Path(os.environ[FOLDER]) / f"cancel-{asked(scope)[1]}"
    await asyncio.to_thread(wait_until, word.exists)
    running.cancel()
    await asyncio.wait([running])
    await send({"type": "http.response.start", "status": 499, "headers": []})
    await send(
        {"type": "http.response.body", "body": b"cancelled" if running.cancelled() else b"not cancelled"}
    )
