"""Steps of requests: what a handler had finished when it failed, the retry of the request does not run again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from django.db.transaction import non_atomic_requests
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client, override_settings
from django.urls import path
from fastapi import FastAPI
from flask import Flask
from tests.http.test_django import MIDDLEWARE

from effectonce import Receiver, current
from effectonce.http import PUBLIC
from effectonce.http import asgi as asgi_boundary
from effectonce.http import wsgi as wsgi_boundary
from effectonce.http.fastapi import install
from effectonce.http.flask import Idempotency

HEADERS = {"Idempotency-Key": '"k"'}


class Work:
    """What a handler does: two steps, with a failure between them the first time."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def effect(self, name: str) -> str:
        self.done.append(f"{name} {current().key_for('sink')}")
        return name

    def fail_once(self) -> None:
        if current().number == 1:
            raise OSError("no route to the bank")

    def handle(self) -> str:
        one = current().step("one", self.effect, "one")
        self.fail_once()
        return f"{one} {current().step('two', self.effect, 'two')}"

    async def ahandle(self) -> str:
        one = await current().astep("one", self.effect, "one")
        self.fail_once()
        return f"{one} {await current().astep('two', self.effect, 'two')}"


def plain_asgi(work: Work) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await work.ahandle()).encode()
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return asgi_boundary.IdempotencyMiddleware(app, Receiver("memory://"), scope=PUBLIC)


def fastapi_async(work: Work) -> Any:
    app = FastAPI()
    app.post("/pay")(work.ahandle)
    install(app, Receiver("memory://"), scope=PUBLIC)
    return app


def fastapi_threads(work: Work) -> Any:
    """A plain endpoint, which FastAPI runs on a thread."""
    app, here = FastAPI(), threading.get_ident()

    @app.post("/pay")
    def pay() -> str:
        assert threading.get_ident() != here
        return work.handle()

    install(app, Receiver("memory://"), scope=PUBLIC)
    return app


def plain_wsgi(work: Work) -> Any:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        body = work.handle().encode()
        start_response("201 Created", [("Content-Type", "text/plain")])
        return [body]

    return wsgi_boundary.IdempotencyMiddleware(app, Receiver("memory://"), scope=PUBLIC)


def flask(work: Work) -> Any:
    app = Flask("shop")
    app.post("/pay")(work.handle)
    Idempotency(app, Receiver("memory://"), scope=PUBLIC)
    return app


def ask_asgi(app: Any) -> tuple[int, str]:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.post("/pay", headers=HEADERS)

    response = asyncio.run(main())
    return response.status_code, response.text


def ask_wsgi(app: Any) -> tuple[int, str]:
    with httpx.Client(transport=httpx.WSGITransport(app)) as client:
        try:
            response = client.post("http://here/pay", headers=HEADERS)
        except OSError:  # a server would say so
            return 500, ""
    return response.status_code, response.text


# Django, which finds its views by their place in a module.

django_work = Work()


def pay(request: HttpRequest) -> HttpResponse:
    return HttpResponse(django_work.handle())


@non_atomic_requests
async def pay_later(request: HttpRequest) -> HttpResponse:
    return HttpResponse(await django_work.ahandle())


urlpatterns = [path("pay", pay), path("pay-later", pay_later)]


def django_sync(work: Work) -> Any:
    return _django(work, lambda: Client(raise_request_exception=False).post("/pay", headers=HEADERS))


def django_async(work: Work) -> Any:
    async def post() -> Any:
        return await AsyncClient(raise_request_exception=False).post("/pay-later", headers=HEADERS)

    return _django(work, lambda: asyncio.run(post()))


def _django(work: Work, post: Callable[[], Any]) -> Callable[[], Any]:
    django_work.done = work.done
    words = {"receiver": Receiver("memory://"), "scope": PUBLIC}

    def ask() -> Any:
        with override_settings(EFFECTONCE=words, ROOT_URLCONF=__name__, MIDDLEWARE=[MIDDLEWARE]):
            return post()

    return ask


def ask_django(app: Callable[[], Any]) -> tuple[int, str]:
    response = app()
    return response.status_code, response.content.decode()


@pytest.mark.parametrize(
    ("make", "ask"),
    [
        (plain_asgi, ask_asgi),
        (fastapi_async, ask_asgi),
        (fastapi_threads, ask_asgi),
        (plain_wsgi, ask_wsgi),
        (flask, ask_wsgi),
        (django_sync, ask_django),
        (django_async, ask_django),
    ],
    ids=lambda each: each.__name__,
)
def test_a_retried_request_goes_on(
    make: Callable[[Work], Any], ask: Callable[[Any], tuple[int, str]]
) -> None:
    """The first try fails after one step, the retry runs the other; every repeat gets the answer."""
    work = Work()
    app = make(work)
    assert ask(app)[0] == 500
    first, second = ask(app), ask(app)
    assert first == second
    assert first[0] in (200, 201)
    assert "one two" in first[1]
    assert [done.split()[0] for done in work.done] == ["one", "two"]
    assert len(set(work.done)) == 2
