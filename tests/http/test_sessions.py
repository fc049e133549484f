"""Client sessions over HTTP: the middlewares of ASGI and WSGI, and the clients on httpx and requests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import httpx
import pytest
import requests
from tests.http.pieces import Pieces

from effectonce import Receiver
from effectonce.errors import KeyReused, UsageError
from effectonce.http.client import Rules, named
from effectonce.http.sessions import (
    AsyncSessionTransport,
    SessionAdapter,
    SessionMiddleware,
    SessionTransport,
    WSGISessionMiddleware,
    ahttp_session,
    http_session,
)
from effectonce.sessions import ClientSession, Journal, Opened, Sessions

ADA = {"x-user": "ada"}
QUICK = Rules(backoff="1ms", longest="1ms", poll="1ms", budget="20s")


class Shop:
    """An app that counts its charges, behind a middleware of either kind."""

    def __init__(self) -> None:
        self.charges: list[bytes] = []
        self.statuses: list[int] = []
        self.receiver = Receiver("memory://")
        self.sessions = Sessions(self.receiver, window=4)

    def charge(self, body: bytes) -> tuple[int, bytes]:
        self.charges.append(body)
        return self.statuses.pop(0) if self.statuses else 201, b'{"charge": %d}' % len(self.charges)

    async def asgi_app(self, scope: Any, receive: Any, send: Any) -> None:
        status, answer = self.charge((await receive())["body"])
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    def wsgi_app(self, environ: Any, start_response: Any) -> list[bytes]:
        status, answer = self.charge(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
        headers = [("content-type", "application/json"), ("content-length", str(len(answer)))]
        start_response(f"{status} Said", headers)
        return [answer]

    def asgi(self, **rules: Any) -> SessionMiddleware:
        return SessionMiddleware(self.asgi_app, self.receiver, scope=user, sessions=self.sessions, **rules)

    def wsgi(self, **rules: Any) -> WSGISessionMiddleware:
        return WSGISessionMiddleware(
            self.wsgi_app, self.receiver, scope=user, sessions=self.sessions, **rules
        )


def user(request: Any) -> str | None:
    name: str | None = request.headers.get("x-user")
    return name


@pytest.fixture
def shop() -> Iterator[Shop]:
    shop = Shop()
    yield shop
    shop.sessions.close()
    shop.receiver.close()


Send = Callable[..., httpx.Response]


@pytest.fixture(params=["asgi", "wsgi"])
def send(request: pytest.FixtureRequest, shop: Shop) -> Send:
    """Sends one request to the shop, through the middleware of either kind."""
    return sending(shop, request.param)


def sending(shop: Shop, kind: str, **rules: Any) -> Send:
    if kind == "wsgi":
        client = httpx.Client(transport=httpx.WSGITransport(shop.wsgi(**rules)), base_url="http://shop")
        return lambda method, path, **choices: client.request(method, path, **choices)
    app = shop.asgi(**rules)

    def send(method: str, path: str, **choices: Any) -> httpx.Response:
        async def story() -> httpx.Response:
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://shop"
            ) as client:
                return await client.request(method, path, **choices)

        return asyncio.run(story())

    return send


def opened(send: Send, **headers: str) -> ClientSession:
    response = send("POST", "/session", headers=ADA | headers)
    assert response.status_code == 201
    assert response.headers["cache-control"] == "no-store"
    return ClientSession(Opened(**response.json()))


def test_a_numbered_request_runs_once_and_its_repeat_gets_the_same_answer(send: Send, shop: Shop) -> None:
    """Status, body and headers, with a mark; the number is echoed."""
    session = opened(send)
    request = session.begin()
    first, second = (send("POST", "/pay", headers=ADA | request.headers, content=b"5") for _ in range(2))
    assert (first.status_code, first.json()) == (second.status_code, second.json()) == (201, {"charge": 1})
    assert [r.headers.get("x-idempotency-replayed") for r in (first, second)] == [None, "true"]
    assert [r.headers["request-number"] for r in (first, second)] == ["1", "1"]
    assert "Request-Number" in first.headers["access-control-expose-headers"]
    assert shop.charges == [b"5"]


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"Client-Id": "0" * 32}, 410, "session-expired"),
        ({"x-user": "bob"}, 410, "session-expired"),
        ({"Request-Number": "1", "Acked-Through": "0"}, 409, "request-stale"),
        ({"Request-Number": "9"}, 400, "request-invalid"),
        ({"Acked-Through": "3"}, 400, "request-invalid"),
        ({"Request-Number": "0"}, 400, "request-invalid"),
        ({"Request-Number": "-3"}, 400, "request-invalid"),
        ({"Request-Number": "3, 3"}, 400, "request-invalid"),
        ({"Request-Number": "1" * 40}, 400, "request-invalid"),
        ({"Acked-Through": ""}, 400, "request-invalid"),
        ({"Client-Id": "a b"}, 400, "request-invalid"),
        ({"Client-Id": "x" * 5000}, 400, "request-invalid"),
        ({"Client-Epoch": "2"}, 409, "client-fenced"),
        ({"Client-Epoch": "x"}, 400, "request-invalid"),
        ({"x-user": ""}, 403, "scope-missing"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_request_without_a_place_is_refused(
    send: Send, shop: Shop, change: dict[str, str], status: int, code: str
) -> None:
    """By a problem document that can't be retried; nothing is executed. Nobody can tell another's session from none."""
    session = opened(send)
    for _ in range(2):
        with session.request() as request:
            send("POST", "/pay", headers=ADA | request.headers)
    headers = ADA | session.begin().headers | change
    refused = send("POST", "/pay", headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (status, code)
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.json()["retryable"] is False
    assert len(shop.charges) == 2


def test_another_request_under_a_number_is_refused(send: Send, shop: Shop) -> None:
    """Path, query and body are part of what was asked."""
    request = opened(send).begin()
    send("POST", "/pay", headers=ADA | request.headers, content=b"5")
    for path, body in (("/pay", b"6"), ("/pay?twice=yes", b"5"), ("/refund", b"5")):
        refused = send("POST", path, headers=ADA | request.headers, content=body)
        assert (refused.status_code, refused.json()["code"]) == (422, "key-reused")
    assert shop.charges == [b"5"]


def test_a_server_error_releases_the_number(send: Send, shop: Shop) -> None:
    """A retry under the same number may run again, as with a key."""
    shop.statuses = [503, 201]
    request = opened(send).begin()
    assert [send("POST", "/pay", headers=ADA | request.headers).status_code for _ in range(3)] == [
        503,
        201,
        201,
    ]
    assert len(shop.charges) == 2


@pytest.mark.parametrize("kind", ["asgi", "wsgi"])
def test_new_sessions_and_new_numbers_count_as_new_keys(shop: Shop, kind: str) -> None:
    """Of which a caller may use so many in a minute; repeats still get their answers."""
    send = sending(shop, kind, max_new_keys=3)
    session = opened(send)
    begun = [session.begin() for _ in range(3)]

    def pay(number: int) -> httpx.Response:
        return send("POST", "/pay", headers=ADA | begun[number].headers, content=b"5")

    assert [pay(number).status_code for number in (0, 0, 1, 2, 0)] == [201, 201, 201, 429, 201]
    refusal = pay(2)
    assert (refusal.json()["code"], refusal.headers["request-number"]) == ("too-many-keys", "3")
    assert send("POST", "/session", headers=ADA).json()["code"] == "too-many-keys"
    assert send("POST", "/session", headers={"x-user": "bob"}).status_code == 201
    assert send("PUT", "/session", headers=ADA | {"Client-Id": session.client}).status_code == 200
    assert len(shop.charges) == 2


def test_the_session_path(send: Send, shop: Shop) -> None:
    """POST opens and resumes, PUT keeps, DELETE ends; nothing of it reaches the app."""
    session = opened(send)
    client = {"Client-Id": session.client}
    session.done(session.begin())
    kept = send("PUT", "/session", headers=ADA | session.headers)
    assert (kept.status_code, kept.json()["acked"]) == (200, 1)
    resumed = send("POST", "/session", headers=ADA | client)
    assert (resumed.status_code, resumed.json()["epoch"]) == (200, 2)
    assert send("PUT", "/session", headers=ADA | client).json()["code"] == "client-fenced"
    assert send("GET", "/session", headers=ADA | client).status_code == 400
    assert send("PUT", "/session", headers=ADA).status_code == 400
    assert send("POST", "/session", headers={}).json()["code"] == "scope-missing"
    assert send("POST", "/session", headers={"x-user": "bob"} | client).status_code == 410
    latest = client | {"Client-Epoch": "2"}
    assert send("DELETE", "/session", headers=ADA | latest).status_code == 204
    assert send("DELETE", "/session", headers=ADA | latest).json()["code"] == "session-expired"
    assert shop.charges == []


def test_other_requests_go_by_their_keys_or_pass(send: Send, shop: Shop) -> None:
    """As without sessions."""
    keyed = [send("POST", "/pay", headers=ADA | {"Idempotency-Key": '"k"'}) for _ in range(2)]
    assert [r.headers.get("x-idempotency-replayed") for r in keyed] == [None, "true"]
    assert send("POST", "/pay", headers=ADA).json()["code"] == "key-missing"
    assert send("GET", "/pay", headers=ADA).status_code == 201
    assert len(shop.charges) == 2


class Flaky(httpx.BaseTransport):
    """Loses requests and answers, in turn."""

    def __init__(self, inner: httpx.BaseTransport) -> None:
        self.inner, self.sent = inner, 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.sent += 1
        if self.sent % 3 == 1:
            raise httpx.ConnectError("refused")
        response = self.inner.handle_request(request)
        if self.sent % 3 == 2:
            raise httpx.ReadError("lost")
        return response


def test_httpx_sends_until_it_is_answered_and_acknowledges(shop: Shop, tmp_path: Path) -> None:
    """One number for all tries; what is answered is acknowledged with the next request."""
    plain = httpx.WSGITransport(shop.wsgi())
    with httpx.Client(transport=plain, base_url="http://shop", headers=ADA) as client:
        session = http_session("/session", client)
    flaky = Flaky(plain)
    with httpx.Client(
        transport=SessionTransport(session, flaky, rules=QUICK), base_url="http://shop", headers=ADA
    ) as client:
        for number in range(1, 7):
            response = client.post("/pay", json={"n": number})
            assert (response.status_code, response.json()) == (201, {"charge": number})
            assert session.acked == number
    assert [json.loads(body)["n"] for body in shop.charges[:6]] == list(range(1, 7))
    assert flaky.sent > 6


def test_a_request_that_stays_without_answer_is_outstanding_until_it_is_sent_again(shop: Shop) -> None:
    """The same request object has the same number; a note says so."""

    class Deaf(httpx.BaseTransport):
        hears = False

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            response = plain.handle_request(request)
            if not self.hears:
                raise httpx.ReadError("lost")
            return response

    plain, deaf = httpx.WSGITransport(shop.wsgi()), Deaf()
    with httpx.Client(transport=plain, base_url="http://shop", headers=ADA) as client:
        session = http_session("/session", client)
    brief = Rules(backoff="1ms", longest="1ms", budget="100ms")
    with httpx.Client(transport=SessionTransport(session, deaf, rules=brief), headers=ADA) as client:
        request = client.build_request("POST", "http://shop/pay", json=1)
        with pytest.raises(httpx.ReadError) as error:
            client.send(request)
        assert any("Request 1 of the session has no answer" in note for note in error.value.__notes__)
        deaf.hears = True
        assert client.post("http://shop/pay", json=2).json() == {"charge": 2}
        assert (session.outstanding, session.acked) == ([1], 0)
        again = client.send(request)
        assert (again.json(), again.headers["x-idempotency-replayed"]) == ({"charge": 1}, "true")
        assert (session.outstanding, session.acked) == ([], 2)
    assert len(shop.charges) == 2


def test_a_challenge_is_answered_under_the_number_that_met_it(shop: Shop) -> None:
    """A 401 says nothing of an earlier try, whose answer got lost: what follows it has the same number."""

    class Guarded(httpx.BaseTransport):
        sent = 0

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            self.sent += 1
            if self.sent == 2:  # meanwhile the nonce is too old
                challenge = 'Digest realm="shop", nonce="n", qop="auth"'
                return httpx.Response(401, headers={"www-authenticate": challenge}, content=b"")
            response = plain.handle_request(request)
            if self.sent == 1:
                raise httpx.ReadError("lost")
            return response

    plain = httpx.WSGITransport(shop.wsgi())
    with httpx.Client(transport=plain, base_url="http://shop", headers=ADA) as client:
        session = http_session("/session", client)
    transport = SessionTransport(session, Guarded(), rules=QUICK)
    with httpx.Client(transport=transport, headers=ADA, auth=httpx.DigestAuth("ada", "secret")) as client:
        answer = client.post("http://shop/pay", json=1)
    assert (answer.status_code, answer.headers["x-idempotency-replayed"]) == (201, "true")
    assert (session.outstanding, session.acked, len(shop.charges)) == ([], 1, 1)


class Cut(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Answers that are read while they come, of which the first breaks off."""

    def __init__(self, shop: Shop) -> None:
        self.wsgi, self.sent = httpx.WSGITransport(shop.wsgi()), 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.sent += 1
        content = self.wsgi.handle_request(request).read()
        rest = httpx.ReadError("cut") if self.sent == 1 else content[5:]
        lines = {"content-type": "application/x-ndjson"}
        return httpx.Response(201, headers=lines, stream=Pieces([content[:5], rest]))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self.handle_request(request)


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_an_answer_that_breaks_off_while_it_is_read_is_not_acknowledged(shop: Shop, kind: str) -> None:
    """It can be asked for again; when it has been read, or was closed by whoever reads it, it is acknowledged."""
    plain = httpx.WSGITransport(shop.wsgi())
    with httpx.Client(transport=plain, base_url="http://shop", headers=ADA) as client:
        session = http_session("/session", client)

    def blocking() -> None:
        transport = SessionTransport(session, Cut(shop), rules=QUICK)
        with httpx.Client(transport=transport, base_url="http://shop", headers=ADA) as client:
            request = client.build_request("POST", "/pay", content=b"5")
            with pytest.raises(httpx.ReadError) as cut:
                client.send(request)
            assert "Request 1 of the session has no answer" in cut.value.__notes__[-1]
            assert session.outstanding == [1]
            assert (client.send(request).json(), session.acked) == ({"charge": 1}, 1)
            with client.stream("POST", "/pay", content=b"6") as response:
                assert next(response.iter_raw()) == b'{"cha'
            assert session.acked == 2

    async def awaited() -> None:
        transport = AsyncSessionTransport(session, Cut(shop), rules=QUICK)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop", headers=ADA) as client:
            request = client.build_request("POST", "/pay", content=b"5")
            with pytest.raises(httpx.ReadError) as cut:
                await client.send(request)
            assert "Request 1 of the session has no answer" in cut.value.__notes__[-1]
            assert session.outstanding == [1]
            assert ((await client.send(request)).json(), session.acked) == ({"charge": 1}, 1)
            async with client.stream("POST", "/pay", content=b"6") as response:
                assert await anext(response.aiter_raw()) == b'{"cha'
            assert session.acked == 2

    blocking() if kind == "blocking" else asyncio.run(awaited())
    assert shop.charges == [b"5", b"6"]


def test_a_restarted_program_finds_its_numbers_by_name(shop: Shop, tmp_path: Path) -> None:
    """A named request keeps its number in the journal; one that was answered is not sent again."""
    plain = httpx.WSGITransport(shop.wsgi())

    def started(inner: httpx.BaseTransport) -> tuple[ClientSession, httpx.Client]:
        journal = Journal(tmp_path / "session.db")
        with httpx.Client(transport=plain, base_url="http://shop", headers=ADA) as client:
            session = http_session("/session", client, journal=journal)
        brief = Rules(backoff="1ms", longest="1ms", budget="100ms")
        transport = SessionTransport(session, inner, rules=brief)
        return session, httpx.Client(transport=transport, base_url="http://shop", headers=ADA)

    class Deaf(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            plain.handle_request(request)
            raise httpx.ReadError("lost")

    _, client = started(Deaf())
    with client, pytest.raises(httpx.ReadError), named("invoice-7"):
        client.post("/pay", json=7)
    session, client = started(plain)
    (doubt,) = session.in_doubt()
    assert (doubt.name, doubt.number, session.epoch) == ("invoice-7", 1, 2)
    assert doubt.payload[:2] == ["POST", "http://shop/pay"]
    with client:
        with pytest.raises(KeyReused):
            client.post("/pay", json=8, extensions={"effectonce_name": "invoice-7"})
        assert client.post("/pay", json=7, extensions={"effectonce_name": "invoice-7"}).json() == {
            "charge": 1
        }
        with pytest.raises(UsageError, match="answered as request 1"):
            client.post("/pay", json=7, extensions={"effectonce_name": "invoice-7"})
    assert session.answer_to("invoice-7") == 201
    assert (session.in_doubt(), len(shop.charges)) == ([], 1)


@pytest.mark.parametrize("over", ["resumed by another", "ended"])
def test_a_refusal_by_the_session_is_no_answer_to_a_request(shop: Shop, tmp_path: Path, over: str) -> None:
    """The journal says that it is in doubt, and whoever goes on with the session sends it again."""
    plain = httpx.WSGITransport(shop.wsgi())

    class Deaf(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("lost")

    def started() -> ClientSession:
        with httpx.Client(transport=plain, base_url="http://shop", headers=ADA) as client:
            return http_session("/session", client, journal=Journal(tmp_path / "session.db"))

    def pay(session: ClientSession, inner: httpx.BaseTransport) -> httpx.Response:
        brief = Rules(backoff="1ms", longest="1ms", budget="100ms")
        transport = SessionTransport(session, inner, rules=brief)
        with httpx.Client(transport=transport, base_url="http://shop", headers=ADA) as client:
            return client.post("/pay", json=7, extensions={"effectonce_name": "invoice-7"})

    first = started()
    with pytest.raises(httpx.ConnectError) as error:
        pay(first, Deaf())
    assert any("session.give_up(1)" in note for note in error.value.__notes__)
    if over == "ended":
        shop.sessions.end(first.client, scope="ada")
        assert pay(first, plain).status_code == 410
        assert [entry.name for entry in first.in_doubt()] == ["invoice-7"]
        return
    second = started()
    assert pay(first, plain).json()["code"] == "client-fenced"
    assert [entry.name for entry in second.in_doubt()] == ["invoice-7"]
    assert pay(second, plain).json() == {"charge": 1}
    assert (second.answer_to("invoice-7"), second.in_doubt()) == (201, [])


@pytest.mark.parametrize("echoed", [True, False], ids=["by the server", "by a proxy"])
@pytest.mark.parametrize("status", [301, 302, 303])
def test_a_redirection_to_a_get_takes_nothing_of_the_session_along(status: int, echoed: bool) -> None:
    """It is an answer if it comes from the session's server; the GET may lead to another host."""
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if request.method == "GET":
            return httpx.Response(200)
        echo = {"request-number": request.headers["request-number"]} if echoed else {}
        return httpx.Response(status, headers={"location": "http://elsewhere/receipt", **echo})

    session = ClientSession(Opened("c" * 32))
    transport = SessionTransport(session, httpx.MockTransport(handler), rules=QUICK)
    with httpx.Client(transport=transport, follow_redirects=True) as client:
        assert client.post("http://shop/pay", content=b"5").status_code == 200
    assert [request.method for request in seen] == ["POST", "GET"]
    assert not {"client-id", "request-number", "acked-through", "client-epoch"} & set(seen[1].headers)
    assert session.outstanding == ([] if echoed else [1])


SESSION_HEADERS = {"client-id", "request-number", "acked-through", "client-epoch"}


@pytest.mark.parametrize("colour", ["blocking", "on a loop"])
@pytest.mark.parametrize("status", [307, 308])
@pytest.mark.parametrize(
    ("place", "echoed", "numbers", "left"),
    [
        ("/pay2", False, ["1", "1"], []),
        ("http://shop:80/pay2", False, ["1", "1"], []),
        ("https://shop/pay2", False, ["1", "1"], []),
        ("/pay2", True, ["1", "2"], []),
        ("http://elsewhere/pay2", False, ["1", None], [1]),
        ("http://elsewhere/pay2", True, ["1", None], []),
        ("http://shop.elsewhere/pay2", False, ["1", None], [1]),
    ],
)
def test_a_redirected_request_takes_its_number_to_no_other_host(
    status: int, place: str, echoed: bool, numbers: list[str | None], left: list[int], colour: str
) -> None:
    """On its host it is the same request, unless the session's server has answered it with the redirection."""
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if request.url.path == "/pay2":
            return httpx.Response(201)
        echo = {"request-number": request.headers["request-number"]} if echoed else {}
        return httpx.Response(status, headers={"location": place, **echo})

    session, wire = ClientSession(Opened("c" * 32)), httpx.MockTransport(handler)

    def post() -> httpx.Response:
        own = SessionTransport(session, wire, rules=QUICK)
        mounts = {"http://shop": own, "https://shop": own}
        with httpx.Client(mounts=mounts, transport=wire, follow_redirects=True) as client:
            return client.post("http://shop/pay", content=b"5")

    async def apost() -> httpx.Response:
        own = AsyncSessionTransport(session, wire, rules=QUICK)
        mounts = {"http://shop": own, "https://shop": own}
        async with httpx.AsyncClient(mounts=mounts, transport=wire, follow_redirects=True) as client:
            return await client.post("http://shop/pay", content=b"5")

    response = post() if colour == "blocking" else asyncio.run(apost())
    assert response.status_code == 201
    assert [request.headers.get("request-number") for request in seen] == numbers
    assert numbers[1] or not SESSION_HEADERS & set(seen[1].headers)
    assert session.outstanding == left


def test_httpx_on_an_event_loop(shop: Shop, tmp_path: Path) -> None:
    """Many at once, more than the window; each happens once, and what waits for room does not block the loop."""

    async def story(journal: Journal | None) -> list[Any]:
        plain = httpx.ASGITransport(shop.asgi())
        async with httpx.AsyncClient(transport=plain, base_url="http://shop", headers=ADA) as client:
            session = await ahttp_session("/session", client, journal=journal)
        transport = AsyncSessionTransport(session, plain, rules=QUICK)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop", headers=ADA) as client:
            responses = await asyncio.gather(*(client.post("/pay", json=n) for n in range(12)))
        assert session.acked == 12
        return sorted(response.json()["charge"] for response in responses)

    assert asyncio.run(story(None)) == list(range(1, 13))
    assert asyncio.run(story(Journal(tmp_path / "session.db"))) == list(range(13, 25))
    assert len(shop.charges) == 24


@pytest.mark.parametrize("noted", [False, True], ids=["without a journal", "with a journal"])
def test_many_that_wait_for_a_number_keep_no_answer_from_coming(tmp_path: Path, noted: bool) -> None:
    """Also when they are more than there are threads for all: an answer has to make room for them."""
    journal = Journal(tmp_path / "session.db") if noted else None
    session = ClientSession(Opened("c" * 32, window=4), journal=journal)

    async def story() -> list[httpx.Response]:
        full = asyncio.Barrier(4)

        async def answer(_: httpx.Request) -> httpx.Response:
            await full.wait()
            return httpx.Response(201)

        transport = AsyncSessionTransport(session, httpx.MockTransport(answer), rules=QUICK)
        async with (
            asyncio.timeout(30),
            httpx.AsyncClient(transport=transport, base_url="http://shop", timeout=None) as client,
        ):
            return await asyncio.gather(*(client.post("/pay", content=b"5") for _ in range(60)))

    assert {response.status_code for response in asyncio.run(story())} == {201}
    assert (session.acked, session.outstanding) == (60, [])


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url(shop: Shop) -> Iterator[str]:
    """The shop on a real socket."""
    with make_server("127.0.0.1", 0, shop.wsgi(), WSGIServer, _Quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_requests(shop: Shop, url: str, tmp_path: Path) -> None:
    """The same over a real connection: numbers, acknowledgements, names."""
    journal = Journal(tmp_path / "session.db")
    with requests.Session() as plain:
        plain.headers.update(ADA)
        session = http_session(f"{url}/session", plain, journal=journal)
        plain.mount(url, SessionAdapter(session, rules=QUICK))
        assert [plain.post(f"{url}/pay", json=n).json()["charge"] for n in range(3)] == [1, 2, 3]
        assert session.acked == 3
        with named("invoice-9"):
            assert plain.post(f"{url}/pay", json=9).json() == {"charge": 4}
        with named("invoice-9"), pytest.raises(UsageError, match="answered"):
            plain.post(f"{url}/pay", json=9)
        with pytest.raises(UsageError, match="bytes"):
            plain.post(f"{url}/pay", data=iter([b"a", b"b"]))
        assert plain.get(f"{url}/pay").status_code == 201
    assert shop.charges[:4] == [b"0", b"1", b"2", b"9"]


def test_requests_takes_a_number_to_no_other_host(url: str) -> None:
    """Another port is another server: what is redirected there is no request of the session."""
    seen: list[dict[str, str]] = []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        seen.append(environ)
        start_response("307 Elsewhere", [("location", f"{url}/elsewhere"), ("content-length", "0")])
        return []

    with make_server("127.0.0.1", 0, app, WSGIServer, _Quiet) as server, requests.Session() as client:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            here = f"http://127.0.0.1:{server.server_port}/"
            session = ClientSession(Opened("c" * 32))
            client.mount(here, SessionAdapter(session, rules=QUICK))
            response = client.post(here, data=b"5", headers=ADA | {"idempotency-key": '"k"'})
        finally:
            server.shutdown()
            thread.join()
    assert [environ["HTTP_REQUEST_NUMBER"] for environ in seen] == ["1"]
    assert (response.status_code, response.url) == (201, f"{url}/elsewhere")
    assert not SESSION_HEADERS & {name.lower() for name in response.request.headers}
    assert session.outstanding == [1]


def test_what_is_wrong_with_the_configuration_is_said_at_once(shop: Shop) -> None:
    """Before the first request."""
    with pytest.raises(UsageError, match="are not Sessions"):
        SessionMiddleware(shop.asgi_app, shop.receiver, scope=user, sessions=shop.receiver)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="slash"):
        shop.wsgi(session_path="session")
    with pytest.raises(UsageError, match="ClientSession"):
        SessionTransport("http://shop")  # type: ignore[arg-type]


def test_a_session_belongs_to_somebody(shop: Shop) -> None:
    """Handlers that claim for themselves come too late to say whose it is."""
    with pytest.raises(UsageError, match="for whom scope= says"):
        SessionMiddleware(shop.asgi_app, shop.receiver, scope=None, claim="handler", sessions=shop.sessions)
