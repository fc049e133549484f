"""The HTTP boundary in atomic mode: a request's record and its answer commit with what its handler does."""

from __future__ import annotations

import asyncio
import io
import itertools
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import httpx
import psycopg
import pytest
from fastapi import FastAPI, HTTPException
from fastapi import Request as Asked
from fastapi.responses import FileResponse, Response, StreamingResponse
from tests.integration.transaction_drivers import Place
from tests.servers.fixtures import HasURL

from effectonce import Policy, Receiver, current
from effectonce.errors import UsageError
from effectonce.http import PUBLIC
from effectonce.http.atomic import AtomicMiddleware, AtomicWSGIMiddleware, connection
from effectonce.transactions import _retrying


@pytest.fixture
def place(postgres: HasURL) -> Iterator[Place]:
    place = Place("postgresql", postgres.url)
    place.prepare()
    yield place
    place.remove()


class Twice(Response):
    """Is sent a second time when it has been sent."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await super().__call__(scope, receive, send)
        await super().__call__(scope, receive, send)


class Site:
    """A FastAPI app with a boundary in atomic mode, and a client of it."""

    def __init__(self, place: Place, **rules: Any) -> None:
        self.place = place
        self.receiver = Receiver(place.store_url)
        self.begun = 0
        self.at_commit: Callable[[Any], Awaitable[None]] | None = None
        app = FastAPI()

        @app.post("/pay")
        async def pay(request: Asked) -> dict[str, str]:
            id = (await request.body()).decode()
            await connection().execute(f"INSERT INTO {place.effects} VALUES ('{id}')")
            if request.query_params.get("status"):
                raise HTTPException(int(request.query_params["status"]))
            if request.query_params.get("deadlock") and self.begun == 1:
                await connection().rollback()  # as MySQL does for its victim
                raise psycopg.errors.DeadlockDetected("once")
            if request.query_params.get("raises"):
                raise ValueError("no")
            return {"paid": id, "guarantee": current().guarantee}

        @app.post("/file")
        async def file() -> FileResponse:
            return FileResponse(__file__)

        @app.post("/events")
        async def events() -> StreamingResponse:
            await connection().execute(f"INSERT INTO {place.effects} VALUES ('events')")

            async def endless() -> AsyncIterator[bytes]:
                while True:
                    yield b"data: still here\n\n"
                    await asyncio.sleep(0)

            return StreamingResponse(endless(), media_type="text/event-stream")

        @app.post("/short")
        async def short() -> Response:
            await connection().execute(f"INSERT INTO {place.effects} VALUES ('short')")
            return Response(b"cut", headers={"Content-Length": "9"})

        @app.post("/twice")
        async def twice() -> Response:
            await connection().execute(f"INSERT INTO {place.effects} VALUES ('twice')")
            return Twice(b"one")

        @app.post("/empty")
        async def empty() -> Response:
            await connection().execute(f"INSERT INTO {place.effects} VALUES ('empty')")
            return Response(b"null", 204)

        @app.post("/hasty")
        async def hasty() -> None:
            await connection().execute(f"INSERT INTO {place.effects} VALUES ('hasty')")
            await connection().commit()

        mounted = FastAPI()
        mounted.post("/wire")(pay)
        app.mount("/v2", mounted)

        @app.post("/plain")
        async def plain() -> str:
            with pytest.raises(UsageError, match="no transaction"):
                connection()
            return "no key"

        self.app = AtomicMiddleware(app, self.receiver, self.begin, scope=PUBLIC, required=False, **rules)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        self.begun += 1
        async with await psycopg.AsyncConnection.connect(self.place.url) as connection:
            yield connection
            if self.at_commit is not None:
                await self.at_commit(connection)

    async def post(self, key: str | None, id: str, url: str = "/pay") -> httpx.Response:
        headers = {} if key is None else {"Idempotency-Key": f'"{key}"'}
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return await client.post(url, content=id, headers=headers)


def told(place: Place, story: Callable[[Site], Awaitable[None]], **rules: Any) -> None:
    site = Site(place, **rules)
    asyncio.run(story(site))  # type: ignore[arg-type]
    site.receiver.close()


def test_a_request_commits_with_its_answer(place: Place) -> None:
    """The effect happened once, the repeat has the same answer, and the handler knows that it is atomic."""

    async def story(site: Site) -> None:
        first, again = await site.post("k", "a"), await site.post("k", "a")
        assert first.json() == again.json() == {"paid": "a", "guarantee": "atomic"}
        assert (first.headers.get("x-idempotency-replayed"), again.headers["x-idempotency-replayed"]) == (
            None,
            "true",
        )
        assert place.count("a") == 1
        assert (await site.post("k", "another")).status_code == 422
        assert (await site.post(None, "", "/plain")).status_code == 200

    told(place, story)


def test_an_answer_of_5xx_and_an_exception_undo(place: Place) -> None:
    """Nothing of what the handler did stays, and the retry runs; an answer of 4xx is an answer, with its effects."""

    async def story(site: Site) -> None:
        assert (await site.post("k", "a", "/pay?status=503")).status_code == 503
        with pytest.raises(ValueError, match="no"):
            await site.post("k2", "a", "/pay?raises=1")
        assert place.count("a") == 0
        assert (await site.post("k2", "a", "/pay?status=402")).status_code == 402
        assert (await site.post("k2", "a", "/pay?status=402")).headers["x-idempotency-replayed"] == "true"
        assert place.count("a") == 1

    told(place, story)


def test_a_handler_that_commits_by_itself_is_told_so(place: Place) -> None:
    """What it did is there without its answer. Under on_crash="in_doubt" no repeat does it again."""

    async def story(site: Site) -> None:
        with pytest.raises(UsageError, match="must not commit"):
            await site.post("k", "", "/hasty")
        code, deadline = "in-progress", time.monotonic() + 20.0
        while code == "in-progress" and time.monotonic() < deadline:
            code = (await site.post("k", "", "/hasty")).json()["code"]
        assert code == "outcome-unknown"
        assert place.count("hasty") == 1

    told(place, story, policy=Policy(on_crash="in_doubt", lease="500ms"))


def test_a_5xx_that_is_remembered_is_undone_too(place: Place) -> None:
    """Its repeats get the same answer, and of what led to it nothing stays."""

    async def story(site: Site) -> None:
        first, again = [await site.post("k", "a", "/pay?status=503") for _ in range(2)]
        assert (first.status_code, again.status_code) == (503, 503)
        assert again.headers["x-idempotency-replayed"] == "true"
        assert place.count("a") == 0

    told(place, story, on_server_error="remember")


def test_what_is_run_again_is_asked_as_the_first_time(place: Place) -> None:
    """An app that is mounted somewhere is found again: its framework notes in the scope how far it has come."""

    async def story(site: Site) -> None:
        async def fail_once(connection: Any) -> None:
            if site.begun == 1:
                raise psycopg.errors.SerializationFailure("once")

        site.at_commit = fail_once
        assert (await site.post("k", "a", "/v2/wire")).status_code == 200
        assert (site.begun, place.count("a")) == (2, 1)

    told(place, story)


@pytest.mark.parametrize("on_server_error", ["release", "remember", "in_doubt"])
def test_the_victim_of_a_deadlock_is_run_again(place: Place, on_server_error: str) -> None:
    """Also where the engine has ended its transaction, savepoint and all; it is no answer, to be remembered or not."""

    async def story(site: Site) -> None:
        assert (await site.post("k", "a", "/pay?deadlock=1")).status_code == 200
        assert (site.begun, place.count("a")) == (2, 1)

    told(place, story, on_server_error=on_server_error)


def test_an_answer_by_a_path_is_read(place: Place) -> None:
    """A server that can send files by itself is not asked to, for an answer has to be seen to be recorded."""
    content = Path(__file__).read_bytes()

    async def story(site: Site) -> None:
        inner = site.app

        async def offering(scope: Any, receive: Any, send: Any) -> None:  # as granian does
            await inner({**scope, "extensions": {"http.response.pathsend": {}}}, receive, send)

        site.app = offering  # type: ignore[assignment]
        first, again = await site.post("k", "", "/file"), await site.post("k", "", "/file")
        assert first.content == again.content == content

    told(place, story)


def test_half_an_answer_is_an_error(place: Place) -> None:
    """One that is shorter than it says can't be sent, so it is not recorded, and what led to it is undone."""

    async def story(site: Site) -> None:
        with pytest.raises(RuntimeError, match="9 bytes, and sent 3"):
            await site.post("k", "", "/short")
        assert place.count("short") == 0

    told(place, story)


def test_two_answers_in_one_are_an_error(place: Place) -> None:
    """Neither is recorded, nor what was made of both, and what led to them is undone."""

    async def story(site: Site) -> None:
        with pytest.raises(RuntimeError, match="twice"):
            await site.post("k", "", "/twice")
        assert place.count("twice") == 0

    told(place, story)


def test_an_answer_that_can_have_no_body_loses_the_one_it_has(place: Place) -> None:
    """A 204 with a body is sent without, as servers do; what its handler did is committed."""

    async def story(site: Site) -> None:
        answers = [await site.post("k", "", "/empty") for _ in range(2)]
        assert [(answer.status_code, answer.content) for answer in answers] == [(204, b"")] * 2
        assert place.count("empty") == 1

    told(place, story)


def test_half_a_request_is_refused(place: Place) -> None:
    """A body that is shorter than its Content-Length, where a server lets it pass, was not asked for."""

    async def story(site: Site) -> None:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"a", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"idempotency-key", b'"k"'), (b"content-length", b"9")]
        scope = {"type": "http", "method": "POST", "path": "/pay", "query_string": b"", "headers": headers}
        await site.app(scope, receive, send)
        assert sent[0]["status"] == 400
        assert b"request-incomplete" in sent[1]["body"]
        assert place.count("a") == 0

    told(place, story)


def test_nobody_is_told_before_the_commit(place: Place) -> None:
    """A commit that fails is no answer; one that the engine wants to be tried again is, handler and all."""

    async def story(site: Site) -> None:
        async def refuse(connection: Any) -> None:
            raise RuntimeError("the disk is full")

        site.at_commit = refuse
        with pytest.raises(RuntimeError, match="disk"):
            await site.post("k", "a")
        assert place.count("a") == 0

        async def fail_once(connection: Any) -> None:
            if site.begun < 3:
                raise psycopg.errors.SerializationFailure("once")

        site.at_commit = fail_once
        assert (await site.post("k", "a")).status_code == 200
        assert (site.begun, place.count("a")) == (3, 1)

    told(place, story)


def test_a_stream_of_events_is_refused(place: Place) -> None:
    """It has no end to commit at: it is told at its start instead of being held for ever, and nothing stays."""

    async def story(site: Site) -> None:
        with pytest.raises(UsageError, match="stream of events"):
            await site.post("k", "", "/events")
        assert place.count("events") == 0
        assert (await site.post("k", "a")).status_code == 200

    told(place, story)


def test_a_transaction_that_is_run_again_uses_one_new_key(place: Place) -> None:
    """However often the engine asks for it, at the commit or before; who may use one more key can."""

    async def story(site: Site) -> None:
        async def fail_twice(connection: Any) -> None:
            if site.begun < 4:
                raise psycopg.errors.SerializationFailure("again")

        site.at_commit = fail_twice
        assert (await site.post("k1", "a", "/pay?deadlock=1")).status_code == 200
        assert site.begun == 4
        assert [(await site.post(f"k{n}", "a")).status_code for n in (2, 2, 1, 3)] == [200, 200, 422, 429]

    told(place, story, max_new_keys=2)


def test_a_database_that_is_away_is_told_as_a_store_is(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503, to be sent again with the same key; the log says why."""
    monkeypatch.setattr(_retrying, "FIRST_PAUSE", 0.0)

    async def story(site: Site) -> None:
        async def break_off(connection: Any) -> None:
            raise psycopg.OperationalError("the server closed the connection")

        site.at_commit = break_off
        refused = await site.post("k", "a")
        assert (refused.status_code, refused.json()["code"]) == (503, "store-unavailable")
        assert refused.headers["retry-after"] == "1"
        site.at_commit = None
        assert (await site.post("k", "a")).status_code == 200
        assert place.count("a") == 1

    told(place, story)
    assert "Requests get 503: the server closed the connection" in caplog.text


def test_concurrent_requests_with_one_key(place: Place) -> None:
    """One runs; the others are told that it runs, or have its answer."""

    async def story(site: Site) -> None:
        answers = await asyncio.gather(*(site.post("k", "a") for _ in range(6)))
        assert {answer.status_code for answer in answers} <= {200, 409}
        assert place.count("a") == 1

    told(place, story)


def replayed_in(headers: list[tuple[str, str]]) -> str | None:
    return {name.lower(): value for name, value in headers}.get("x-idempotency-replayed")


class Shop:
    """A WSGI app with a boundary in atomic mode over SQLite, and a client of it."""

    def __init__(self, folder: Path, app: Any, **rules: Any) -> None:
        self.place = Place("sqlite", f"sqlite:///{folder / 'app.db'}")
        self.place.prepare()
        self.receiver = Receiver(self.place.store_url)
        self.begun = 0
        self.site = AtomicWSGIMiddleware(app, self.receiver, self.begin, scope=PUBLIC, **rules)

    @contextmanager
    def begin(self) -> Iterator[Any]:
        self.begun += 1
        with closing(sqlite3.connect(self.place.path, timeout=30)) as opened, opened:
            opened.execute("BEGIN IMMEDIATE")
            yield opened

    def post(self, key: str, id: str) -> tuple[str, bytes, str | None]:
        environ: dict[str, Any] = {
            "REQUEST_METHOD": "POST", "PATH_INFO": "/", "CONTENT_LENGTH": str(len(id)),
            "wsgi.input": io.BytesIO(id.encode()), "HTTP_IDEMPOTENCY_KEY": f'"{key}"',
        }  # fmt: skip
        setup_testing_defaults(environ)
        said: list[Any] = []

        def start_response(status: str, headers: Any, exc_info: Any = None) -> None:
            said.append((status, headers))

        body = b"".join(self.site(environ, start_response))
        status, headers = said[-1]
        return status[:3], body, replayed_in(headers)


def locked_database() -> sqlite3.OperationalError:
    locked = sqlite3.OperationalError("database is locked")
    locked.sqlite_errorcode = sqlite3.SQLITE_BUSY
    return locked


def test_wsgi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for WSGI, over SQLite: once, replayed, undone by 5xx, and a large answer is done without its body."""
    monkeypatch.setattr(_retrying, "FIRST_PAUSE", 0.0)

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        id = environ["wsgi.input"].read().decode()
        connection().execute(f"INSERT INTO {shop.place.effects} VALUES ('{id}')")
        write = start_response("503 No" if id == "fails" else "200 OK", [("Content-Type", "text/plain")])
        if id == "locked":
            raise locked_database()
        if id == "corrected":  # it says another thing instead
            write(b"all is well")
            start_response("402 No", [], (ValueError, ValueError("no"), None))
        return [b"x" * 100 if id == "large" else id.encode()]

    shop = Shop(tmp_path, app, max_response=50)
    post = shop.post
    with shop.receiver:
        assert [post("k", "a"), post("k", "a")] == [("200", b"a", None), ("200", b"a", "true")]
        assert post("k2", "fails")[0] == post("k2", "fails")[0] == "503"
        assert post("k3", "large")[:2] == ("200", b"x" * 100)
        assert post("k3", "large")[0] == "409"
        status, problem, _ = post("k5", "locked")
        assert (status, b"store-unavailable" in problem) == ("503", True)
        assert post("k4", "corrected")[:2] == post("k4", "corrected")[:2] == ("402", b"corrected")
    assert [shop.place.count(id) for id in ("a", "fails", "large")] == [1, 0, 1]


def test_wsgi_refuses_a_stream_of_events(tmp_path: Path) -> None:
    """Whether it says so at once, or with its first event; nothing of what its handler did stays."""

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        id = environ["wsgi.input"].read().decode()
        connection().execute(f"INSERT INTO {shop.place.effects} VALUES ('{id}')")

        def events() -> Iterator[bytes]:
            start_response("200 OK", [("content-type", "Text/Event-Stream; charset=utf-8")])
            yield from itertools.repeat(b"data: still here\n\n")

        return itertools.chain([next(events())], events()) if id == "at once" else events()

    shop = Shop(tmp_path, app)
    with shop.receiver:
        for id in ("at once", "later"):
            with pytest.raises(UsageError, match="stream of events"):
                shop.post("k", id)
            assert shop.place.count(id) == 0


def test_wsgi_uses_one_new_key_for_a_transaction_that_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the engine asks for it; who may use one more key can."""
    monkeypatch.setattr(_retrying, "FIRST_PAUSE", 0.0)

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        if shop.begun < 3:
            raise locked_database()
        start_response("200 OK", [])
        return []

    shop = Shop(tmp_path, app, max_new_keys=2)
    with shop.receiver:
        assert (shop.post("k1", "")[0], shop.begun) == ("200", 3)
        assert [shop.post(f"k{n}", "")[0] for n in (2, 1, 2, 3)] == ["200", "200", "200", "429"]
