"""The same app behind each contender: ``uvicorn --factory benchmarks.peers.apps:idemkit``.

Each is set up as its own documentation shows, with the store that it has for several processes, and told who is
calling wherever it can be told. Nobody's packages are imported before they are asked for.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.peers.kitchen import STREAMED, cook, keep, lease, store

CALLER = "x-caller"
BREAK = b"x-break"


def _starlette(**options: Any) -> Any:
    """The app; under ``/inner`` there is a middleware of the kind that passes answers on in pieces."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Mount, Route

    async def handle(request: Any) -> Any:
        asked = await request.body()
        name = request.query_params["n"]
        meal = await asyncio.to_thread(cook, request.path_params["what"], name, asked)
        response = Response(meal.body, meal.status)
        for header in meal.headers:
            response.headers.append(*header)
        return response

    async def stream(_: Any) -> Any:
        async def pieces() -> Any:
            for piece in STREAMED:
                yield piece
                await asyncio.sleep(0)

        return StreamingResponse(pieces(), media_type="text/plain")

    async def pass_on(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    routes = [Route("/stream", stream), Route("/{what}", handle, methods=["POST", "PATCH"])]
    inside = Mount("/inner", routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=pass_on)])
    return Starlette(routes=[inside, *routes], **options)


class _Breaking:
    """Stands outside, between the boundary and the server: where a request says so, nothing can be sent."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and any(name == BREAK for name, _ in scope["headers"]):
            send = _broken
        await self._app(scope, receive, send)


async def _broken(_: Any) -> None:
    raise OSError("the connection is gone")


def bare() -> Any:
    """The app alone."""
    return _Breaking(_starlette())


def effectonce() -> Any:
    """effectonce, on Redis."""
    from effectonce import Policy, Receiver
    from effectonce.http.asgi import IdempotencyMiddleware

    receiver = Receiver(store(), policy=Policy(lease=lease(), keep=keep()))
    return _Breaking(
        IdempotencyMiddleware(_starlette(), receiver, scope=lambda request: request.headers.get(CALLER))
    )


def effectonce_waiting() -> Any:
    """effectonce, with duplicates that wait."""
    from effectonce import Policy, Receiver
    from effectonce.http.asgi import IdempotencyMiddleware

    receiver = Receiver(store(), policy=Policy(lease=lease(), keep=keep()))
    return _Breaking(
        IdempotencyMiddleware(
            _starlette(), receiver, scope=lambda request: request.headers.get(CALLER), busy="wait"
        )
    )


def idemkit() -> Any:
    """idemkit, on Redis."""
    from idemkit import HttpConfig, IdempotencyMiddleware, RedisBackend

    config = HttpConfig(
        scope=lambda request: request.headers.get(CALLER, "anonymous"),
        lease_ttl_seconds=lease(),
        wait_timeout_seconds=2.0,
        expires_after_seconds=keep(),
    )
    app = _starlette()
    app.add_middleware(IdempotencyMiddleware, backend=RedisBackend.from_url(store()), config=config)
    return _Breaking(app)


def asgi_idempotency_header() -> Any:
    """asgi-idempotency-header, on Redis. It has neither callers nor leases."""
    from idempotency_header_middleware import IdempotencyHeaderMiddleware
    from idempotency_header_middleware.backends.redis import RedisBackend
    from redis.asyncio import from_url

    app = _starlette()
    app.add_middleware(
        IdempotencyHeaderMiddleware, backend=RedisBackend(redis=from_url(store()), expiry=int(keep()))
    )
    return _Breaking(app)


def fastapi_idempotency() -> Any:
    """fastapi-idempotency, on its store for several processes, a table by Tortoise; here in SQLite."""
    from datetime import timedelta

    from fastapi_idempotency import IdempotencyMiddleware
    from fastapi_idempotency.stores.tortoise import TortoiseStore
    from tortoise.contrib.fastapi import RegisterTortoise

    @asynccontextmanager
    async def database(app: Any) -> Any:
        models = {"models": ["fastapi_idempotency.stores.tortoise"]}
        async with RegisterTortoise(app, db_url=f"sqlite://{store()}", modules=models, generate_schemas=True):
            yield

    app = _starlette(lifespan=database)
    app.add_middleware(
        IdempotencyMiddleware,
        store=TortoiseStore(),
        scope=lambda request: request.headers.get(CALLER, ""),
        key_window=timedelta(seconds=keep()),
        lease_seconds=lease(),
        heartbeat_seconds=lease() / 3,
        wait_seconds=2,
    )
    return _Breaking(app)


def fastapi_idempotency_key() -> Any:
    """fastapi-idempotency-key, on SQLite: on Redis 0.1.1 loses the fingerprint, and answers every repeat with 422.

    One time is its lease and its memory.
    """
    from fastapi_idempotency_key import IdempotencyMiddleware
    from fastapi_idempotency_key.backends.sqlite import SQLiteBackend

    app = _starlette()
    app.add_middleware(
        IdempotencyMiddleware,
        backend=SQLiteBackend(store()),
        default_ttl=int(keep()),
        timeout=2.0,
    )
    return _Breaking(app)
