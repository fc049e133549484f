"""The app that is measured, alone and behind each contender: ``uvicorn --factory benchmarks.web.apps:effectonce``.

It reads the body and answers 201 with some JSON; ``GET /runs`` tells how often it did so for a POST.
``EFFECTONCE_BENCH_STORE`` is the URL of the store, or a file.
"""

from __future__ import annotations

import json
import os
from typing import Any

from benchmarks.workers.base import RESULT

ANSWER = json.dumps(RESULT, separators=(",", ":")).encode()
STORE = "EFFECTONCE_BENCH_STORE"
runs = 0


def _headers(body: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]


HEADERS = _headers(ANSWER)


async def app(scope: Any, receive: Any, send: Any) -> None:
    """The bare app."""
    global runs
    if scope["type"] == "lifespan":
        await _live(receive, send)
        return
    while (await receive()).get("more_body"):
        pass
    body, headers = ANSWER, HEADERS
    if scope["method"] == "POST":
        runs += 1
    elif scope["path"] == "/runs":
        body = b"%d" % runs
        headers = _headers(body)
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _live(receive: Any, send: Any) -> None:
    while True:
        word = (await receive())["type"]
        await send({"type": f"{word}.complete"})
        if word == "lifespan.shutdown":
            return


def bare() -> Any:
    """Nothing around it."""
    return app


def effectonce() -> Any:
    """Behind effectonce, with one scope for all, as most rivals have it."""
    from effectonce import Receiver
    from effectonce.http import PUBLIC
    from effectonce.http.asgi import IdempotencyMiddleware

    return IdempotencyMiddleware(app, Receiver(os.environ[STORE]), scope=PUBLIC)


def effectonce_scoped() -> Any:
    """Behind effectonce, with a scope for each caller."""
    from effectonce import Receiver
    from effectonce.http.asgi import IdempotencyMiddleware

    return IdempotencyMiddleware(app, Receiver(os.environ[STORE]), scope=lambda r: r.headers["x-caller"])


def idemkit() -> Any:
    """Behind idemkit, on Redis."""
    from idemkit import HttpConfig, IdempotencyMiddleware, RedisBackend

    # Sixty-four callers want more connections than its driver gives by default, and got 503.
    backend = RedisBackend.from_url(os.environ[STORE], max_connections=1000)
    return IdempotencyMiddleware(app, backend=backend, config=HttpConfig(scope_mode="single_tenant"))


def asgi_idempotency_header() -> Any:
    """Behind asgi-idempotency-header, on Redis."""
    from idempotency_header_middleware import IdempotencyHeaderMiddleware
    from idempotency_header_middleware.backends.redis import RedisBackend
    from redis.asyncio import from_url

    return IdempotencyHeaderMiddleware(app, backend=RedisBackend(redis=from_url(os.environ[STORE])))


def fastapi_idempotency_key() -> Any:
    """Behind fastapi-idempotency-key, on SQLite: on Redis 0.1.1 refuses every repeat."""
    from fastapi_idempotency_key import IdempotencyMiddleware
    from fastapi_idempotency_key.backends.sqlite import SQLiteBackend

    return IdempotencyMiddleware(app, backend=SQLiteBackend(os.environ[STORE]))
