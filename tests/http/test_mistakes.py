"""What newcomers get wrong is said where they wrote it, in words that say what to write instead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from flask import Flask

from effectonce import Receiver
from effectonce.errors import UsageError
from effectonce.http import PUBLIC, Route
from effectonce.http.asgi import IdempotencyMiddleware
from effectonce.http.client import AsyncIdempotencyTransport, IdempotencyTransport, Rules
from effectonce.http.fastapi import idempotent, install
from effectonce.http.flask import Idempotency
from effectonce.http.webhooks import Stripe, Webhooks

SECRET_URL = "redis://:hunter2@store"


async def unused(*_: Any) -> None:
    raise AssertionError


def boundary(receiver: Any = None, **words: Any) -> IdempotencyMiddleware:
    return IdempotencyMiddleware(unused, receiver or Receiver("memory://"), **{"scope": PUBLIC, **words})


def webhooks(receiver: Any = None, scheme: Any = None) -> Webhooks:
    return Webhooks(receiver or Receiver("memory://"), scheme or Stripe("secret"), endpoint="/hooks")


def twice() -> None:
    app, receiver = FastAPI(), Receiver("memory://")
    install(app, receiver)
    install(app, receiver)


@pytest.mark.parametrize(
    ("mistake", "hint"),
    [
        (lambda: boundary(SECRET_URL), r"A str is not a Receiver. Write Receiver\(url\)"),
        (lambda: install(FastAPI(), SECRET_URL, scope=PUBLIC), "not a Receiver"),  # type: ignore[arg-type]
        (lambda: boundary(routes=["/payments"]), r"'/payments', which is not a Route. Write Route\("),
        (lambda: Route("/payments", retain="7d"), "retain: no such rule"),  # type: ignore[call-arg]
        (lambda: boundary(policy="payments"), r"not a Policy. Write Policy\("),
        (lambda: boundary(key="id"), r"key='id' must be a plain function: key\(request, body\)"),
        (lambda: boundary(key=unused), "must be a plain function"),
        (lambda: idempotent("acme"), "name a dependency"),  # type: ignore[arg-type]
        (twice, "has a boundary already"),
        (lambda: webhooks(SECRET_URL), "not a Receiver"),
        (lambda: webhooks(scheme="whsec_hunter2"), r"such as Stripe\(secret\)"),
        (lambda: IdempotencyTransport(Rules()), r"rules=Rules\("),  # type: ignore[arg-type]
        (lambda: AsyncIdempotencyTransport(httpx.HTTPTransport()), "not an httpx.AsyncBaseTransport"),  # type: ignore[arg-type]
        (lambda: IdempotencyTransport(rules={"budget": 5}), r"Write Rules\("),  # type: ignore[arg-type]
        (lambda: IdempotencyTransport(journal=Path("sent.db")), r'Write Journal\("sent.db"\)'),  # type: ignore[arg-type]
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_told_where_it_was_made(mistake: Callable[[], object], hint: str) -> None:
    """Before the first request, and without a secret that stands in what was given."""
    with pytest.raises(UsageError, match=hint) as told:
        mistake()
    assert "hunter2" not in str(told.value)


def post(app: FastAPI, path: str, method: str = "POST") -> int:
    """Send a request with a key, and give the status."""

    async def send() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            return (await client.request(method, path, headers={"Idempotency-Key": "k"})).status_code

    return asyncio.run(send())


def test_a_key_that_nobody_claims_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A client that sends a key counts on it. A route that forgot to claim is named in the log, once."""
    app = FastAPI()
    install(app, Receiver("memory://"))
    app.post("/covered", dependencies=[idempotent(lambda: "ann")])(lambda: "paid")
    app.post("/forgotten")(lambda: "paid")
    with caplog.at_level(logging.WARNING, logger="effectonce"):
        assert (post(app, "/covered"), post(app, "/nowhere")) == (200, 404)
        assert caplog.messages == []
        assert (post(app, "/forgotten"), post(app, "/forgotten")) == (200, 200)
    (message,) = caplog.messages
    assert message.startswith("POST '/forgotten' was done without protection")


def test_a_key_that_is_claimed_further_inside_is_no_mistake(caplog: pytest.LogCaptureFixture) -> None:
    """A mounted app with a boundary of its own claims it there, and has the problems in its own document."""
    app, mounted, receiver = FastAPI(), FastAPI(), Receiver("memory://")
    mounted.post("/covered", dependencies=[idempotent(lambda: "ann")])(lambda: "paid")
    app.mount("/inside", mounted)
    install(app, receiver)
    install(mounted, receiver)
    with caplog.at_level(logging.WARNING, logger="effectonce"):
        assert post(app, "/inside/covered") == 200
    assert caplog.messages == []
    assert "503" in mounted.openapi()["paths"]["/covered"]["post"]["responses"]


def test_a_dependency_on_a_method_that_is_not_covered_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Who writes idempotent(...) at a PUT counts on it. Each such route is named in the log, once."""
    app = FastAPI()
    install(
        app,
        Receiver("memory://"),
        routes=[Route("/free/*", covered=False), Route("/sold/*", methods=["PUT"])],
    )
    for path in ("/prices/{item}", "/stock/{item}", "/free/{item}", "/sold/{item}"):
        app.put(path, dependencies=[idempotent(lambda: "ann")])(lambda: "put")
    with caplog.at_level(logging.WARNING, logger="effectonce"):
        assert [post(app, path, "PUT") for path in ("/sold/1", "/free/1")] == [200, 200]
        assert caplog.messages == []
        for path in ("/prices/1", "/prices/2", "/stock/1"):
            assert post(app, path, "PUT") == 200
    first, second = caplog.messages
    assert first == (
        "PUT '/prices/{item}' was done without protection: its handler is marked, but only PATCH, POST are covered. "
        "Add it to the rule methods=."
    )
    assert second.startswith("PUT '/stock/{item}'")


def test_a_view_that_is_marked_for_other_methods_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Rules of a view's own say that it is meant to be covered. Safe methods need no protection."""
    app = Flask("shop")
    idempotency = Idempotency(app, Receiver("memory://"), scope=PUBLIC)
    app.route("/forgotten", methods=["GET", "PUT"])(idempotency.rules(keep="7d")(lambda: "put"))
    app.put("/covered", endpoint="covered")(idempotency.rules(methods=["PUT"])(lambda: "put"))
    app.put("/unmarked", endpoint="unmarked")(lambda: "put")
    client = app.test_client()
    with caplog.at_level(logging.WARNING, logger="effectonce"):
        for path in ("/covered", "/unmarked"):
            assert client.put(path, headers={"Idempotency-Key": "k"}).status_code == 200
        assert client.get("/forgotten").status_code == 200
        assert caplog.messages == []
        assert [client.put("/forgotten").status_code for _ in range(2)] == [200, 200]
    (message,) = caplog.messages
    assert message.startswith("PUT '/forgotten' was done without protection: its handler is marked")
