"""An app that hands on the answers of another service, which has a boundary of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from effectonce import Receiver
from effectonce.http import PUBLIC
from effectonce.http.asgi import IdempotencyMiddleware
from effectonce.http.client import replayed


async def gateway(scope: Any, receive: Any, send: Any) -> None:
    """Hands on an answer that the other service gave before, to a key that it was given."""
    headers = [
        (b"x-idempotency-replayed", b"true"),
        (b"idempotent-replayed", b"true"),
        (b"idempotency-key", b'"behind"'),
        (b"x-other", b"kept"),
    ]
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    await send({"type": "http.response.body", "body": b"paid"})


def test_a_repeat_has_the_marks_of_the_boundary_that_answers_it() -> None:
    """Once, with its own key: a client that reads "true, true" would not know a replay."""

    async def main() -> httpx.Response:
        covered = IdempotencyMiddleware(gateway, Receiver("memory://"), scope=PUBLIC)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(covered), base_url="http://here"
        ) as client:
            await client.post("/", headers={"Idempotency-Key": "front"})
            return await client.post("/", headers={"Idempotency-Key": "front"})

    repeat = asyncio.run(main())
    assert replayed(repeat)
    assert repeat.headers.get_list("idempotency-key") == ["front"]
    assert repeat.headers.get_list("x-idempotency-replayed") == ["true"]
    assert "idempotent-replayed" not in repeat.headers
    assert repeat.headers["x-other"] == "kept"
